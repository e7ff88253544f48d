"""Engines: the ways to have SGLang answer requests, behind one protocol.

Other folders import `base` (Engine), `registry` (make_engine, model_of), and the functions that the
subfolders offer. Only the registry makes the engines themselves (in `http.client`, `http.background`,
`http.gateway`, `launched.fleet` and `simulated`).
"""
