"""File formats: Parquet, Arrow, CSV, JSON Lines, batch files, as row groups that can be read on their own.

parquet, arrow and text read files; the records of text are those of csv_records, json_lines or batch_lines,
whose IDs unique_ids compares. shapes finds the types of JSON values, values makes columns of texts. base has
what all share.
"""
