"""The files of a checkpoint: finding, reading, decoding and writing its tensors."""
