"""Parts of the clients."""
