"""Training runs: order, journal, promises, and recovery after a restart."""
