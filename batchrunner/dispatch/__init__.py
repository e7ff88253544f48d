"""TODO dispatch."""
