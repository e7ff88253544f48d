"""Launched engines: servers that a run starts, supervises and ends.

Nobody imports from here but the registry (`fleet`: LaunchedFleet). `launcher.py` is a script of its own.
"""
