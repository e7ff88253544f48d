"""Logs: what an SGLang server's log says of its load, its arguments and its troubles.

Others import `lines` (record_in) and `records` for single lines, `reader` (LogReader) for whole logs,
`facts`, `series`, `signs` and `thresholds` for what is read of them. `load` and `cause` are for engines.
"""
