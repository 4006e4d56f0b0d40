"""What a layer can be made of: mixers (attention, gated delta nets), feed-forwards (MLP, experts, per-layer
embeddings), and the Block that connects them to the residual stream with norms. Each computes in segments, between
which a plan keeps, offloads or recomputes residuals; some run over tiles of tokens.
"""
