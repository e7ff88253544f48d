"""Paths in a bucket of one row a file, and the rows that each of them means."""

from __future__ import annotations

BUCKET_PATHS = [
    ("in", [0, 1]),
    ("in/", [0, 1]),
    ("in/year=2/b.parquet", [1]),
    ("in/year=*/*.parquet", [0, 1]),
    ("in/year=1/*", [0]),
    ("**/b.parquet", [2, 1]),
    ("*.parquet", [3]),
]
