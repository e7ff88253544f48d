"""Tuning: which of SGLang's flags to change, by the signs of a server's load.

`signals` has the only thresholds and words of the signs, `flags` the table of what each flag does, `memory`
what was learned about a model on a machine. Four parts read them: advice (`rules`, `advise`), changes during
a run (`adapt`), recovery after a death (`recover`), and the search of `batchrun tune` (`search`).
The decisions are pure; engines and runner act on them.
"""
