"""Tasks that a model does without decoding: one file for each, with all that differs from other tasks.

Others may import `TASKS`, `TaskName` and `last_part` (table.py) and `VECTOR` (embed.py). A task is a subclass
of `core.types.ForwardTask`: its endpoint, its request, its answers, its columns, the arguments of its server.
"""
