"""Logs: what an SGLang server's log says about its load, its arguments and its failures.

`lines` parses single lines. `reader` reads whole logs into facts and a `series` of load samples.
"""
