"""`batchrun tune`: trials of a job's own rows under other server flags, to find the fastest safe ones.

Others may import `tune` and `parse_budget` (tuner.py) and `TuningSummary` (summary.py). The search itself
(search.py, space.py, race.py, measurement.py) is pure.
"""
