"""Checkpoints and model files that come from, or go to, other places: downloads, archives, the
Hugging Face hub.
"""
