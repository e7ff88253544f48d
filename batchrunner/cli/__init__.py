"""The command: parse, call, print, exit code. No decisions; everything heavy is imported when it is used.

command: `batchrun` itself. running, jobs, results: its commands. No other folder imports from here.
"""

from batchrunner.cli.command import app, main

__all__ = ["app", "main"]
