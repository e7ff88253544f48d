"""Engines: the ways to have SGLang answer requests, behind one protocol.

Others import `base` (Engine) and `registry` (make_engine, model_of) from here, and what the subfolders
offer. The engines themselves (`attached`, `simulated`, `launched.fleet`) are made by the registry alone.
"""
