"""From Parquet files to requests: finding files, reading rows, rendering prompts.

files and dataset (`Dataset`) read the Parquet files; templates and render (`Renderer`) make requests of rows;
select (`selected_rows`) applies filter and limit; job_input (`JobInput`) holds these together. row_reader
(`RowReader`) reads rows in the order in which they are sent; prefixes compares prompts.
"""
