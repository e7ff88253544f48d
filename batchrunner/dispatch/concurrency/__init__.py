"""How many requests each route may have in flight. Pure.

Others import `ConcurrencyLimits` (limits.py: all schedulers of an engine) and `Decision` (controller.py: a
change of a window). A `Controller` moves one scheduler's window; corners.py says what its queue and token
usage mean, window.py how large its first window is.
"""
