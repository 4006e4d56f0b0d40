"""The files of a checkpoint: finding its folder, reading, decoding and quantising its tensors, identifying it by a
digest, and writing models into new folders that appear complete or not at all."""
