"""Sends rows to the engine: reading ahead, order, tokenization, slots, retries, checks, control by the load.

The runner builds the parts (`runner/send.py`). `Feeder` and `Dispatcher` (dispatcher.py) move rows through
the `Backlog` (queue.py), bundles.py shares requests among rows, checks.py says whether an answer is good.
concurrency/ polls the engine's load and resizes the `Slots`; progress.py sums up what the display shows.
"""
