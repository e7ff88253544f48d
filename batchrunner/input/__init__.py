"""From files, or a program's data, to requests in sending order.

Files: files finds and opens them (`SourceFile`), with compression; text_files reads other formats than
Parquet, by csv_records and batch_lines; parquet_copy writes rows as Parquet; dataset (`Dataset`) reads the
rows of all files. tables reads the data of a program.

Requests: render (`Renderer`) makes them of rows, by templates, messages, python_prompts and request_bodies.
job_input (`JobInput`) holds dataset and renderer, and applies filter and limit.

Order: order decides whether rows are sorted, from the sample that order_sample reads; prompt_bytes compares
prompts; sorted_copy sorts the rows and reads them sorted.
"""
