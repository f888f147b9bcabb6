"""Engines in other processes, on this machine or on others."""
