"""Launched engines: servers that a run starts, supervises and ends.

Only the registry imports from here (`fleet`: LaunchedFleet). `launcher.py` is a separate script.
"""
