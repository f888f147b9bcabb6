"""Settings, credentials and versions of the clients."""
