"""Decides which of SGLang's flags to change, from what a server's load shows.

`signals` defines what counts as a sign in the load, with thresholds and wording. `flags` has the table of
what each flag does. `memory` has what was learned about a model on a machine. Four groups of modules use
them: advice (`rules`, `advise`), changes during a run (`adapt`), recovery after a server's death (`recover`),
and the search of `batchrun tune` (`search`). They only decide; engines and runner act on the decisions.
"""
