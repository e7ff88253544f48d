"""Sends rows to the engine: reading ahead, order, tokenization, slots, retries, checks, control by the load.

The runner builds the parts (`runner/sending.py`): `Feeder` and `Dispatcher` move rows through the `Backlog`;
bundles/ sends them, checks/ says whether an answer is its row's. `LoadLoop` polls the engine, `Feedback`
resizes the `Slots`, and `HoldingBack` asks the engine to admit more. `Monitor` makes the `Snapshot` that
the display and the event log show.
"""
