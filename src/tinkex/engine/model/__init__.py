"""The forward pass of a decoder."""
