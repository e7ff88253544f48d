"""Runs a job: plans the rows, opens the engine, sends the rows, and writes a report.

Other packages import `execute` (a whole start of a run), `prepare` (checks without an engine),
`run_in_foreground` (with signals and display), `stream` (a program's rows), `check` and `status`.
"""
