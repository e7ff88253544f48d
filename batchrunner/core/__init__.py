"""Errors, records and small data structures for all other folders; imports nothing from the package.

errors: all exceptions. types: the records that pass between folders (Request, Outcome, EngineInfo). row_set:
sets of row ordinals. backoff: `pause_before_retry`. jsonfile: `read_json`. timing: `TIMING`
(pauses in seconds).
"""
