"""From Parquet files to requests: finding files, reading rows, rendering prompts.

files and dataset (`Dataset`) read the Parquet files; templates and render (`Renderer`) make requests of rows;
job_input (`JobInput`) holds these together, and applies filter and limit. prefixes compares prompts. dataset
also has `RowReader`, the protocol of what reads rows in the order in which they are sent.
"""
