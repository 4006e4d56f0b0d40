"""The folder of a run: the record by which a run recognises its own files (record.py), checkpoints (checkpoint.py,
array_files.py, checkpoint_damage.py), when they are saved (saving.py) and which is the best (best.py), exported results
(results.py), the state that it reports (run_state.py), the names of the files (run_folder.py), and the lock that keeps
a second run out (folder_lock.py). Not of the folder is run_rows.py, which tokenises the rows that the run trains on and
is evaluated on, and makes the source of its batches."""
