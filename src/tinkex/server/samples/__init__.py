"""Samplers and their samples: weights, in-flight targets, recordings."""
