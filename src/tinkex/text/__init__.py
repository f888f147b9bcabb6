"""Text to tokens and back: chat templates, and tokenizers that are not a `tokenizer.json`."""
