"""The command line: parses, calls the library, prints, and ends with an exit code.

entry: the program `batchrun`. commands: its commands. No other folder imports from here.
"""

from batchrunner.cli.entry import app, main

__all__ = ["app", "main"]
