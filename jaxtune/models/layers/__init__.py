"""What a layer can be made of: mixers (attention, gated delta nets), feed-forwards (MLP, experts with routers,
per-layer embeddings), and the Block that connects them to the residual stream with norms (block.py). Each computes in
segments (segment.py), some of which can run over tiles of tokens (tiles.py). Between segments there are residuals, and
a plan decides which of these are kept for the backward pass and which are offloaded or recomputed. For generation, a
mixer makes a state of a prompt and runs the next tokens with it (`first_state` and `step`)."""
