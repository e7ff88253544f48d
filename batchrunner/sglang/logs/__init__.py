"""Logs: what an SGLang server's log says of its load, its arguments and its troubles.

`lines` reads single lines, `reader` whole logs into facts and a `series` of loads.
"""
