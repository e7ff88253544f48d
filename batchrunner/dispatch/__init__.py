"""Sends rows to the engine: reading ahead, order, tokenisation, windows, retries, checks, load control.

The runner builds the parts (`runner/send.py`). `Feeder` (feeder.py) and `Dispatcher` (dispatcher.py) move
rows through the `Backlog` (queue.py) to the `Routes` (route.py). bundles.py shares requests among rows,
checks.py says whether an answer is good, and attempt.py what a failure means. load_control.py polls the
engine's load, and concurrency/ moves the windows of the routes by it; progress.py sums up what is shown.
"""
