"""The server's facts in SQLite, and the checks that find damage to them."""
