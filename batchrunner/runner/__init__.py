"""One attempt at a job: check, plan, build, run, report.

Others import `execute` (the whole attempt), `prepare` (checks without an engine), `run_in_foreground` (with
signals and display), `batch` (a batch file), stream_call (a program's rows), `check` and `status`.
"""
