"""TODO sort."""
