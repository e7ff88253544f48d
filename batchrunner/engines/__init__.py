"""Engines: the ways to have SGLang answer requests, behind one protocol.

Others import `base` (Engine), `registry` (make_engine, model_of), `model_files` (read_config, shape_of, …),
`flags` (Flags) and `device` (cards, gpus, …) from here, and what the subfolders offer. The engines themselves
(`attached`, `simulated`, `launched.fleet`) are made by the registry alone.
"""
