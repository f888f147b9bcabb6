"""Losses that the caller brings: functions of log-probabilities, and graphs that a server runs."""
