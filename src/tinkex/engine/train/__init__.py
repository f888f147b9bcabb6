"""Training passes, their losses' gradients, and optimizers."""
