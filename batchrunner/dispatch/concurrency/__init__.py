"""TODO concurrency."""
