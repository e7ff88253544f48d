"""Answers that are checked: what is wrong with one, what is asked next, and what that costs.

The dispatcher gives an answer to the examiner, which says whether it is the row's result.
"""
