"""`batchrun serve`: OpenAI's Files and Batches for one's own engine.

state: files and batches on the disk. batches: what runs them on one engine. server: the HTTP API, and the
server from start to end. Imported where the command is used.
"""
