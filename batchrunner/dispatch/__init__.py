"""Sends rows to the engine: reading ahead, order, tokenization, concurrency limits, retries, and checks.

The runner builds these objects (`runner/send.py`). `Feeder` (feeder.py) and `Dispatcher` (dispatcher.py) move
rows through the `Backlog` (queue.py) to the `Routes` (route.py). bundles.py puts several rows into one
request. checks.py decides whether an answer is good, and attempt.py decides what happens after a failure.
load_control.py polls the engine's load, and concurrency/ sets the concurrency limit of each server
accordingly. progress.py computes the state of the run for the display, the event log and report.json.
"""
