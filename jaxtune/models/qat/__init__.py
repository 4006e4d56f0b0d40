"""Training with weights and inputs rounded as the exported format rounds them."""
