"""Tune: trials of a job's own rows under other flags, until the fastest safe ones are known."""
