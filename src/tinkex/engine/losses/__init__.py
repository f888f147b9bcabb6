"""Losses: the table, losses sent as graphs, and `stable_reinforce`."""
