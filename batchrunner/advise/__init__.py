"""`batchrun advise`: what a log, a live server or a run shows, and which flags to change.

Others may import `advise`, `advise_run` and `AdviceReport` (advise.py), `memory_band` (situation.py), the
limits of a GPU (roofline.py), and the thresholds and values of the rules (rules/).
"""
