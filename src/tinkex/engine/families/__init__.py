"""Model families: what a checkpoint's `config.json` means."""
