"""HTTP requests of the clients: connections, retries, limits, and servers of other ages."""
