"""Everything that a run writes: its directory, its results and who may write them.

Layout: run_dir (`RunDir`), files (atomic writes), run_json (the job and the fingerprint of a run).
Results: writer (`ResultWriter`), journal, parts, columns, arrow_arrays; resume (`read_done`:
which rows are done); counts; merge, export and batch_results (all results as one dataset, one file or one
batch file); buckets (external bucket sort); disk_wait. Others: events (`EventLog`), holding (`hold_task`),
task_holder (`LivenessMonitor`: whether the holder of a task runs).
"""
