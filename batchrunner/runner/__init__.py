"""One attempt at a job: plan, open, send, report.

Other packages import `execute` (the whole attempt), `prepare` (checks without an engine), `run_in_foreground`
(with signals and display), `stream` (a program's rows), `check` and `status`.
"""
