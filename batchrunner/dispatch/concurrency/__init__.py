"""How many requests each route may have in flight. Pure.

Others import `ConcurrencyLimits` (all schedulers of an engine) and `Controller` (one scheduler).
"""
