"""How many requests each route may have in flight.

Others import `ConcurrencyLimits` (limits.py: all schedulers of an engine) and `Decision` (law.py: a change
of a window). A `Controller` moves one scheduler's window, by the law.
"""
