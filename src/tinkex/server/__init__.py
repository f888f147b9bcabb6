"""The server: an ASGI application over an Engine.

It needs neither torch nor a network.
"""
