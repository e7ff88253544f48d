"""The command line `batchrun`: parses arguments, calls the library, prints, and ends with an exit code.

The file entry is the program, and the file commands has its commands. No other folder imports from this one.
"""

from batchrunner.cli.entry import app, main

__all__ = ["app", "main"]
