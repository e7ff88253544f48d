"""How many requests each route may have in flight. Pure.

Others import `ConcurrencyLimits` (all schedulers of an engine), `Controller` (one scheduler) and
`QueueGauges` (which loads are believed).
"""
