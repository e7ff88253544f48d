"""Errors, records and small data structures for all other folders; imports nothing from the package.

Data: types (the records that pass between folders: Request, Outcome), engine_info (EngineInfo,
SchedulerLoad), errors (all exceptions), exit_codes, row_set (sets of row ordinals), corner (`Corner`),
endpoints (paths of OpenAI's interface), file_format (a file's format by its name), versions. Functions:
backoff (`pause_before_retry`), jsonfile (`read_json`), json_pointer (`part_at`), timing (`TIMING`, pauses in
seconds). The command's streams: console, standard_streams, unforeseen. hooks/ runs a job's Python functions.
"""
