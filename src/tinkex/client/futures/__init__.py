"""Futures, polling and streams: how a call's result comes back."""
