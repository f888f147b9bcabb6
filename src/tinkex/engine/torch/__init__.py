"""The engine on PyTorch: base models, adapters and files."""
