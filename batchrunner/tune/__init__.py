"""`batchrun tune`: trials of a job's own rows under other server flags, to find the fastest safe ones.

Others may import `tune`, `parse_budget` and `TuningSummary` (tuner.py). The search itself (search.py,
space.py, measurement.py) is pure; trial.py runs a server.
"""
