"""TODO launched."""
