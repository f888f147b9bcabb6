"""Access control: keys, owners, limits of bodies and connections."""
