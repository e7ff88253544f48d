"""TODO html."""
