"""`batchrun serve`: OpenAI's Files and Batches API on your own engine.

state: files and batches on the disk. batches: runs them on one engine. server: the HTTP API and the server's
life from start to end. The package is imported only by the command.
"""
