"""Columns of many types that results carry."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa

UTC = dt.timezone.utc  # noqa: UP017 - as pyarrow returns it


MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC)
CARRIED: dict[str, pa.Array[Any]] = {
    "timestamp": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
    "nanoseconds": pa.array([1, 2, None], pa.timestamp("ns")),
    "date": pa.array([dt.date(2024, 2, 29), None, dt.date(1, 1, 1)]),
    "decimal": pa.array([Decimal("1.10"), None, Decimal("-99999999.99")], pa.decimal128(20, 2)),
    "list": pa.array([[1], None, []], pa.list_(pa.int16())),
    "struct": pa.array([{"a": "x", "b": [1.5]}, None, {"a": None, "b": None}]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "binary": pa.array([b"\xff\x00", None, b""]),
    "large_string": pa.array(["a", None, ""], pa.large_string()),
    "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "half": pa.array([1.5, None, 2.5], pa.float32()),
    "boolean": pa.array([True, None, False]),
    "time": pa.array([dt.time(1, 2, 3), None, dt.time(0)], pa.time64("us")),
}
