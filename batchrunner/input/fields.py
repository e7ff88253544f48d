"""Chooses the order of `prompt.fields` in which rows share the longest prefixes, from a sample of the input.

Let columns S come first, in any order. Of N rows as many share all of S with an earlier row as there are rows
beyond the D(S) distinct combinations of values: a share 1 - D(S)/N. So the column c that completes S adds
len(c) * (1 - D(S)/N) bytes a row to what rows share, whatever the order within S: the best order follows by
going through the sets of columns from the small ones to the large ones. Bytes stand for tokens.

The idea to reorder the fields of a table for the prefix cache is that of Liu et al., "Optimizing LLM Queries
in Relational Workloads" (arXiv:2403.05821). D(S) of the whole input is estimated from a sample by Chao's
lower bound (Scandinavian Journal of Statistics 11, 1984), from the combinations that occur once and twice.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from pyroaring import BitMap64

from batchrunner.core.errors import RowRefusedError
from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.order import STRETCHES, stretches
from batchrunner.input.templates import Predicate, field_line
from batchrunner.job.spec import InputSpec

MOST_COLUMNS = 10
"""Columns whose every order is compared: 1,024 sets. Further ones follow by what each shares alone."""
SAMPLED_ROWS = 4000
"""Rows that are read at most, in stretches over the whole input. There is no limit of time: tasks that begin
together must decide alike."""


@dataclass(frozen=True, slots=True)
class FieldOrder:
    """An order of fields, and the share of their bytes that rows then have in common with earlier ones."""

    columns: tuple[str, ...]
    share: float
    written_share: float
    """The same in the order in which the job names them."""
    rows_sampled: int

    def __str__(self) -> str:
        shares = (
            f"{self.share:.0%} of their bytes can come from the cache; as written {self.written_share:.0%}"
        )
        return f"{', '.join(self.columns)} ({shares}; from {self.rows_sampled:,} rows)"


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
        with contextlib.suppress(RowRefusedError):  # a row on which the filter fails is selected
            if predicate is not None and not predicate(row):
                continue
        for at, name in enumerate(columns):
            line = field_line(name, row[name]).encode("utf-8", "surrogatepass")
            values[at].append(hash(line))
            lengths[at] += len(line) + 1
    sampled = len(values[0])
    rows = round(total * sampled / seen) if seen else 0
    return choose_order(columns, values, [length / max(1, sampled) for length in lengths], rows)


def _rows(
    dataset: Dataset, total: int, columns: list[str], predicate: Predicate | None
) -> Iterator[dict[str, Any]]:
    used = sorted({*columns, *(predicate.columns if predicate else [])})
    every = BitMap64(range(total))
    parts = [s[: SAMPLED_ROWS // STRETCHES] for s in stretches(every, dataset.row_group_ends())]
    for some in parts if total > SAMPLED_ROWS else [every]:
        for batch in dataset.read(some, used):
            for row in rows_of(batch, used):
                if not isinstance(row, str):
                    yield row


def choose_order(
    names: Sequence[str], values: Sequence[Sequence[Hashable]], lengths: Sequence[float], rows: int
) -> FieldOrder:
    """Return the best order of these columns; of equally good ones that which is nearest to the given order.

    `values` are those of each column in the sampled rows, `lengths` the mean bytes of each column, and `rows`
    the number of all rows.
    """
    share = _shares(values, rows)
    written = range(len(names))
    alone = sorted(written, key=lambda at: -lengths[at] * share((at,)))
    best: dict[tuple[int, ...], tuple[float, list[int]]] = {(): (0.0, [])}
    for size in range(1, min(len(names), MOST_COLUMNS) + 1):
        for columns in combinations(sorted(alone[:MOST_COLUMNS]), size):
            found = []
            for last in columns:
                shared, order = best[tuple(column for column in columns if column != last)]
                found.append((shared + lengths[last] * share(columns), [*order, last]))
            most = max(shared for shared, _ in found)
            best[columns] = most, min(order for shared, order in found if shared == most)
    _, order = best[columns]
    order += alone[MOST_COLUMNS:]

    def shared_bytes(order: Sequence[int]) -> float:
        return sum(lengths[at] * share(tuple(sorted(order[: place + 1]))) for place, at in enumerate(order))

    most, as_written = shared_bytes(order), shared_bytes(written)
    whole = sum(lengths) or 1.0
    return FieldOrder(
        tuple(names[at] for at in (order if most > as_written else written)),
        max(most, as_written) / whole,
        as_written / whole,
        len(values[0]),
    )


def _shares(values: Sequence[Sequence[Hashable]], rows: int) -> Callable[[tuple[int, ...]], float]:
    """Return the share of all rows that have the values of some columns in common with an earlier row.

    The numbers of the columns ascend.
    """

    @cache
    def labels(columns: tuple[int, ...]) -> list[int]:
        """Return a number for each sampled row, equal where all values are."""
        last = values[columns[-1]]
        before = labels(columns[:-1]) if columns[:-1] else [0] * len(last)
        numbers: dict[tuple[int, Hashable], int] = {}
        return [numbers.setdefault(pair, len(numbers)) for pair in zip(before, last, strict=True)]

    @cache
    def share(columns: tuple[int, ...]) -> float:
        counts = Counter(labels(columns))
        sampled = counts.total()
        distinct: float = len(counts)
        if sampled < rows:
            times = Counter(counts.values())
            distinct += times[1] * (times[1] - 1) / (2 * (times[2] + 1))
        return max(0.0, 1 - distinct / max(rows, sampled, 1)) if sampled else 0.0

    return share
