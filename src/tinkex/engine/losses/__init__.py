"""Losses: the table, the data that they read, and losses sent as graphs."""
