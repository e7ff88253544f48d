"""From files, or a program's data, to requests: finding files, reading rows, rendering prompts.

files finds files and opens them (`SourceFile`), text_files reads what is not Parquet, parquet_copy makes it
Parquet, dataset (`Dataset`) reads the rows of all files, tables those of a program. templates and render
(`Renderer`) make requests of rows, with messages, python_prompts or request_bodies (those of a batch file).
job_input (`JobInput`) holds these together, and applies filter and limit. order compares prompts and decides
whether rows are sorted, sorted_copy sorts them and reads them sorted.
"""
