"""Inputs: texts that share long prefixes, and columns of many types."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENT = 600


def document(number: int) -> str:
    """Return a text of 600 characters that begins unlike those of other numbers."""
    return random.Random(number).randbytes(DOCUMENT // 2).hex()


def shuffled(rows: int, documents: int) -> list[str]:
    """Return questions on some documents, in no order."""
    texts = [f"{document(row % documents)} {row}" for row in range(rows)]
    random.Random(rows).shuffle(texts)
    return texts


def write_texts(path: Path, texts: list[str], row_group: int = 100, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, **columns}), path, row_group_size=row_group)
    return path


UTC = dt.timezone.utc  # noqa: UP017 - as pyarrow returns it


MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC)
CARRIED: dict[str, pa.Array[Any]] = {
    "timestamp": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
    "date": pa.array([dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-99999999.99")], pa.decimal128(20, 2)),
    "list": pa.array([[1], None, []], pa.list_(pa.int16())),
    "struct": pa.array([{"a": "x", "b": [1.5]}, None, {"a": None, "b": None}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "binary": pa.array([b"\xff\x00", None, b""]),
    "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "time": pa.array([dt.time(1, 2, 3), None, dt.time(0)], pa.time64("us")),
}
