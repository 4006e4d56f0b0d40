"""The folder of a run: the record by which a run recognises its own files (record.py), checkpoints, the rows that it
trains on, exported results, the state that it reports, and the lock that keeps a second run out."""
