"""Reads the load, the arguments and the failures of a server from its log.

`lines` parses single lines. `reader` reads whole logs into facts, and into a `series` of load samples.
`causes` finds the lines that explain a failure.
"""
