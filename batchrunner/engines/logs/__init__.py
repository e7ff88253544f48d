"""Logs: what an SGLang server's log says of its load, its arguments and its troubles.

Others import `lines` (record_in) and `records` for single lines, `reader` (LogReader) for whole logs,
`facts`, `series` and `thresholds` for what is read of them. `cause` is for engines.
"""
