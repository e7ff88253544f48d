"""TODO input."""
