"""What a layer can be made of: mixers (attention), feed-forwards (MLP, experts), and the block around one of each."""
