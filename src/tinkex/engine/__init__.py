"""Engines: the protocol that the server calls, and what implements it."""
