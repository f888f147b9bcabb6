"""Files of the data directory: checkpoints, uploads, digests."""
