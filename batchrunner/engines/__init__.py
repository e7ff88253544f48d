"""Engines: the ways to have SGLang answer requests, behind one protocol.

Other folders import `base` (Engine), `registry` (make_engine, model_of), and what the subfolders offer. The
engines themselves (`attached`, `simulated`, `launched.fleet`) are made by the registry alone.
"""
