"""Sends rows to the engine: reading ahead, order, tokenization, slots, retries, control by the load.

The runner builds the parts (`runner/run.py`): `Feeder` and `Dispatcher` move rows through the `Backlog`,
`LoadLoop` polls the engine and `Feedback` resizes the `Slots`. `Monitor` makes the `Snapshot` that the
display and the event log show.
"""
