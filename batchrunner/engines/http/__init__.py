"""TODO http."""
