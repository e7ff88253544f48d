"""Concurrency limits (windows): how many requests each route (a server or gateway) may have in flight.

Other packages import `ConcurrencyLimits` (limits.py: all schedulers of an engine) and `Decision` (law.py: a
change of a window). A `Controller` (law.py) resizes the window of one scheduler by the concurrency law.
"""
