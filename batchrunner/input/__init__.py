"""From files, or a program's data, to requests: finding files, reading rows, rendering prompts.

files finds files, source_file opens one, text_files and batch_lines read what is not Parquet, parquet_copy
saves it as Parquet, dataset (`Dataset`) reads the rows of all files, tables those of a program. templates and
render (`Renderer`) make requests of rows, with messages, python_prompts or request_bodies (those of a batch
file). job_input (`JobInput`) holds these together, and applies filter and limit. prefixes compares prompts,
order decides whether rows are sorted, sorted_copy sorts them and reads them sorted.
"""
