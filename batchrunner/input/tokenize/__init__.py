"""TODO tokenize."""
