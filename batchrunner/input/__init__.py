"""From files, or a program's data, to requests: finding files, reading rows, rendering prompts.

files and dataset (`Dataset`) read files of all formats/; templates, row_values and render (`Renderer`) make
requests of rows, with messages, python_prompts or request_bodies (those of a batch file). job_input
(`JobInput`) holds these together, and applies filter and limit. tables takes a program's data, parquet_copy
saves it. prefixes compares prompts. row_reader has `RowReader`, the protocol of what reads rows
in the order in which they are sent.
"""
