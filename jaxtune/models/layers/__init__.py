"""What a layer can be made of: mixers (attention, gated delta nets), feed-forwards (MLP, experts), and the Block that
connects them to the residual stream with norms (block.py). Each computes in segments (segment.py). Between segments
there are residuals, and a plan decides which of these are kept for the backward pass and which are recomputed."""
