"""The engines: one protocol (base), a file each, and the registry that chooses."""
