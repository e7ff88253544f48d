"""Errors, records and small tools for all other folders. This folder imports from no other folder.

The records are in types (Request, Outcome, sets of row numbers, endpoints), engine_info (EngineInfo,
SchedulerLoad, QueueBand), media, and errors (all exceptions and exit codes). The tools are in timing
(`TIMING`), retry, files, console (the command's streams), processes (threads and signals), loop_thread
(threads and event loops), and server_replies (JSON, errors and aborts of SGLang). The hook_ files and
rollout_worker run a job's Python functions in separate processes.
"""
