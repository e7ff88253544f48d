"""The rules of advice: each finds one sign in a `Situation` and says what to change. Pure.

`apply_all` and `table` (table.py) serve advise/ and the docs; `Advice`, `Finding` and `Rule` are in rule.py.
tune/ imports single values: steps and limits of flags, and the backends of each GPU.
"""
