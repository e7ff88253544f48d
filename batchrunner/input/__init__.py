"""Turns input files, or rows that a Python program passes, into requests in sending order.

Files: `files` finds and opens the input files (`SourceFile`) and uses `compression`. `text_files` reads
formats other than Parquet with `csv_records` and `batch_lines`. `parquet_copy` writes rows as Parquet.
`dataset` (`Dataset`) reads the rows of all files. `tables` reads the rows that a program passes.

Requests: `render` (`Renderer`) makes a request of each row with `templates`, `messages`, `python_prompts` and
`request_bodies`. `job_input` (`JobInput`) has the dataset and the renderer, and applies `input.filter` and
`input.limit`.

Order: `order_sample` reads a sample of prompts, from which `order` decides whether to sort rows.
`prompt_bytes` turns prompts into bytes that can be compared. `sorted_copy` sorts the rows, and reads them in
sorted order.
"""
