"""The documentation, and in `tools` the programs that make parts of it."""
