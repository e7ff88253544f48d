"""The order in which rows are sent, so that shared prefixes are computed once.

Others import `Reorderer`, its parts `ReuseDistance` and `OutputLengths`, and `PrefixPrimer`.
"""
