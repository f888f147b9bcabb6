"""Training runs: order, journal, promises, and taking up what an earlier life of the server left."""
