"""Texts that share long prefixes, in any order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path


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
