"""Tuning: the signs of a server's load, what SGLang's flags do, and which of them to change. Pure decisions.

`signals` has the only thresholds and words of the signs. The law of concurrency, advice, changes during a run
and `batchrun tune` read them there.
"""
