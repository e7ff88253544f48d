"""Sending rows sorted by prompt, so that the engine computes common prefixes once.

Others import plan: `decide_order`, `prepare_order`, `find_sorted_copy`, `open_order`. decide
(`OrderDecision`) judges a sample; external_sort sorts; sorted_copy is the file of sorted rows.
"""
