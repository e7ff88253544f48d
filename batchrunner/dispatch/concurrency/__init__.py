"""Concurrency limits (windows): how many requests each server or gateway may have in flight.

Other packages import `ConcurrencyLimits` (limits.py: all schedulers of an engine) and `Decision` (law.py: a
change of a limit). A `Controller` (law.py) sets the limit of one scheduler from its load.
"""
