"""Everything that a run writes: its directory, its results, and the locks of its workers.

A task is one worker's share of a run. It has a name, a directory and a lock.

Layout: run_dir (`RunDir`, `open_run`), files (atomic writes), run_json (the job and its fingerprint). Stores:
store (`Store`: a file system or an object store), objects (requests, by obstore), addresses (URIs). Locks:
task_lock (`hold_task`), holder (the process that holds a lock), liveness (whether it runs), beacons
(heartbeats of many workers), discard (`--fresh`). Results: writer (`ResultWriter`), parts (Parquet files of
results, and their journals), columns, arrow_arrays, turns (answers of unfinished rollouts); resume
(`read_done`: which rows are done); counts; merge (all results in input order), export (file formats),
batch_results (OpenAI's lines); buckets (external bucket sort); away (waits for a disk or a store). Others:
events (`EventLog`), samples (the event `sample`).
"""
