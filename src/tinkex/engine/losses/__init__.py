"""Losses: the table, graphs that were sent, and `stable_reinforce`."""
