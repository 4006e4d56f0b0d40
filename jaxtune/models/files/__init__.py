"""The files of a checkpoint: reading, decoding and quantising its tensors, a digest of it, and writing new folders that
appear complete or not at all.
"""
