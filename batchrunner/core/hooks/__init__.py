"""A job's Python functions, called in processes of their own.

functions (`HookFunction`, `HookFacts`, `HookResult`) has the records. pool (`HookPool`) is what others use:
it calls a function with many rows, or with one row from an event loop. process and output are the pool's
side of a process; child, loading, annotations, returned and column_types run in the process.
"""
