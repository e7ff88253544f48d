"""File formats: Parquet, Arrow, CSV and JSON Lines, each as row groups that can be read on their own.

parquet, arrow and text read files; the records of text are those of csv_records or json_lines. shapes finds
the types of JSON values, values makes columns of texts. base has what all share.
"""
