"""Sampling: jobs, blocks of keys and values, and the choice of tokens."""
