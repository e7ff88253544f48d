"""TODO advise."""
