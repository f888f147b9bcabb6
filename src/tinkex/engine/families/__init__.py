"""Model families: one module each, and what they share."""
