"""What a layer can be made of: mixers (attention, gated delta nets), feed-forwards (MLP, experts), and the Block that
connects them to the residual stream with norms (block.py). Each computes in segments (segment.py), between which a
plan decides what is kept for the backward."""
