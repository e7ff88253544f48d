"""TODO recovery."""
