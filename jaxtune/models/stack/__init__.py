"""The layers of a decoder as one scan, with a plan of what the backward pass keeps."""
