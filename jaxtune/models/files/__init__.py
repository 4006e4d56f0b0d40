"""The files of a checkpoint: finding its folder, reading, decoding and quantising its tensors, identifying it by a
digest, and writing models into new folders that appear complete or not at all. models/hf.py, which loads and saves
models, is built on this package, and so are adapters' files and exports."""
