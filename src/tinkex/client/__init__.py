"""Parts of the clients: futures of clients, deprecated twins, receipts, custom losses."""
