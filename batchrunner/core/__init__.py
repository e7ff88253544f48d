"""Errors, records and small tools for all other folders; imports nothing else of the package.

Records: types (Request, Outcome, sets of row ordinals, endpoints), engine_info (EngineInfo, SchedulerLoad,
QueueBand), media, errors (all exceptions and exit codes). Tools: timing (`TIMING`), retry, files, console
(the command's streams), processes (threads and signals), loop_thread (threads and event loops),
server_replies (JSON, errors and aborts of SGLang). The hook_ files and rollout_worker run a job's Python
functions in processes of their own.
"""
