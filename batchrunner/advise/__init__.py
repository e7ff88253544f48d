"""`batchrun advise`: what a log, a live server or a run shows, and which flags to change.

Others may import `advise`, `advise_run` and `AdviceReport` (advise.py), `memory_band`
(situation.py), and values of the rules.
"""
