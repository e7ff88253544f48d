"""How many requests each route may have in flight. Pure.

Others import `ConcurrencyLimits` (all schedulers of an engine), `Decision` (a change of a window) and
`QueueGauges` (which loads are believed). A `Controller` moves one scheduler's window by its `Reading`;
corners, filling and row_tokens say what its queue and token usage mean.
"""
