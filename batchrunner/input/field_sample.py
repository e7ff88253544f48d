"""Decides the order of a prompt's fields from a sample of the input, the same in each start and each task."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from pyroaring import BitMap64

from batchrunner.core.errors import RowRefusedError
from batchrunner.input.dataset import Dataset, UnreadableValue, rows_of
from batchrunner.input.field_order import FieldOrder, choose_order
from batchrunner.input.fields_block import field_line
from batchrunner.input.order import STRETCHES, stretches
from batchrunner.input.templates import Predicate
from batchrunner.job.spec import InputSpec

SAMPLED_ROWS = 4000
"""Rows that are read at most, in stretches over the whole input. There is no limit of time: tasks that begin
together must decide alike."""


def decide_fields(
    dataset: Dataset, source: InputSpec, columns: list[str], predicate: Predicate | None
) -> FieldOrder:
    """Return the order of these columns in which rows share most; raises InputError.

    Rows that the filter leaves out do not count, nor do those behind `input.limit` where there is no filter.
    """
    total = dataset.total_rows
    if predicate is None and source.limit is not None:
        total = min(total, source.limit)
    values: list[list[Hashable]] = [[] for _ in columns]
    lengths = [0] * len(columns)
    seen = 0
    for row in _rows(dataset, total, columns, predicate):
        seen += 1
        selected = _selected(predicate, row)
        for at, name in enumerate(columns if selected else []):
            line = field_line(name, row[name]).encode("utf-8", "surrogatepass")
            values[at].append(hash(line))
            lengths[at] += len(line) + 1
    sampled = len(values[0])
    means = [length / max(1, sampled) for length in lengths]
    rows = round(total * sampled / seen) if seen else 0
    return choose_order(columns, values, means, rows)


def _rows(
    dataset: Dataset, total: int, columns: list[str], predicate: Predicate | None
) -> Iterator[dict[str, Any]]:
    used = sorted({*columns, *(predicate.columns if predicate else []), *dataset.problems})
    every = BitMap64(range(total))
    parts = [s[: SAMPLED_ROWS // STRETCHES] for s in stretches(every, dataset.row_group_ends())]
    for some in parts if total > SAMPLED_ROWS else [every]:
        for batch in dataset.read(some, used):
            for row in rows_of(batch, used):
                broken = any(row.pop(name) for name in dataset.problems)
                if not broken and not any(isinstance(value, UnreadableValue) for value in row.values()):
                    yield row


def _selected(predicate: Predicate | None, row: Mapping[str, Any]) -> bool:
    try:
        return predicate is None or predicate(row)
    except RowRefusedError:
        return False
