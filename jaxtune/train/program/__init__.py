"""The compiled train step: loss, gradients, update and sync of gradients, and how its programs are compiled."""
