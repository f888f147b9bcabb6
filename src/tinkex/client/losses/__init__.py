"""Custom losses: functions of log-probabilities, and graphs that a server runs."""
