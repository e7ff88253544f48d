"""TODO prefix_order."""
