"""Errors, records and small things for all other folders; imports nothing from the package.

Data: types (records that pass between folders: Request, Outcome; sets of row ordinals; endpoints),
engine_info (EngineInfo, SchedulerLoad, QueueBand), media, errors (all exceptions and exit codes). Functions:
timing (`TIMING`), files, processes (threads, signals, child processes),
console (the command's streams). hook_pool and hook_worker run a job's Python functions.
"""
