"""`batchrun compare`: runs of one job beside one another, what differs between them and what that did.

The command line may import `compare_runs` (comparison.py).
"""
