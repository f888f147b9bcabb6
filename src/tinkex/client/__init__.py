"""The clients, and what they stand on."""
