"""Which rows are sent, in which order. Today: input order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyroaring import BitMap64

from batchrunner.errors import RowRefusedError
from batchrunner.prompt import UnreadableValue, values_of

if TYPE_CHECKING:
    from batchrunner.dataset import Dataset
    from batchrunner.templates import Predicate


def selected_rows(dataset: Dataset, predicate: Predicate | None, limit: int | None) -> BitMap64:
    """Return the rows that the job is about: those where the filter is true, the first `limit` of them.

    A row where the filter fails (a null compared with a number, say) is selected: it ends as a failed row
    that says so. Only the filter's columns are read, and reading stops at the limit.
    """
    everything = BitMap64()
    everything.add_range(
        0, dataset.total_rows if predicate else min(limit or dataset.total_rows, dataset.total_rows)
    )
    if predicate is None:
        return everything
    selected = BitMap64()
    for batch in dataset.read(everything, predicate.columns):
        columns = [values_of(batch.data.column(name)) for name in predicate.columns]
        for index, row in enumerate(batch.rows):
            values = {name: column[index] for name, column in zip(predicate.columns, columns, strict=True)}
            if _selects(predicate, values):
                selected.add(row)
                if len(selected) == limit:
                    return selected
    return selected


def _selects(predicate: Predicate, values: dict[str, object]) -> bool:
    if any(isinstance(value, UnreadableValue) for value in values.values()):
        return True
    try:
        return predicate(values)
    except RowRefusedError:
        return True
