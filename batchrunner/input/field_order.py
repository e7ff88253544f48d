"""Chooses the order of a prompt's fields in which rows share the longest prefixes. Pure.

Let columns S come first, in any order. Of N rows as many share all of S with an earlier row as there are rows
beyond the D(S) distinct combinations of values: a share 1 - D(S)/N. So the column c that completes S adds
len(c) * (1 - D(S)/N) bytes a row to what rows share, whatever the order within S: the best order follows by
going through the sets of columns from the small ones to the large ones. Bytes stand for tokens.

The idea to reorder the fields of a table for the prefix cache is that of Liu et al., "Optimizing LLM Queries
in Relational Workloads" (arXiv:2403.05821). D(S) of the whole input is estimated from a sample by Chao's
lower bound (Scandinavian Journal of Statistics 11, 1984), from the combinations that occur once and twice.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MOST_COLUMNS = 10
"""Columns whose every order is compared: 1,024 sets. Further ones follow by what each shares alone."""


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


def choose_order(
    names: Sequence[str], values: Sequence[Sequence[Hashable]], lengths: Sequence[float], rows: int
) -> FieldOrder:
    """Return the best order of these columns; of equally good ones that which is nearest to the given order.

    `values` are those of each column in the sampled rows, `lengths` the mean bytes of each column, and `rows`
    the number of all rows.
    """
    shares = _SharedRows(values, rows)
    every = range(len(names))
    alone = sorted(every, key=lambda at: -lengths[at] * shares.of((at,)))
    best = _best(sorted(alone[:MOST_COLUMNS]), lengths, shares) + alone[MOST_COLUMNS:]
    found, written = (_shared_bytes(order, lengths, shares) for order in (best, list(every)))
    order = best if found > written else list(every)
    whole = sum(lengths) or 1.0
    return FieldOrder(
        tuple(names[at] for at in order),
        max(found, written) / whole,
        written / whole,
        len(values[0]) if values else 0,
    )


class _SharedRows:
    """The share of all rows that have the values of some columns in common with an earlier row."""

    def __init__(self, values: Sequence[Sequence[Hashable]], rows: int) -> None:
        self._values = values
        self._rows = rows
        self._labels: dict[tuple[int, ...], list[int]] = {}
        """By set of columns: a number for each row, equal where all values are."""
        self._shares: dict[tuple[int, ...], float] = {}

    def of(self, columns: tuple[int, ...]) -> float:
        """Return the share for a set of columns, whose numbers ascend."""
        if columns not in self._shares:
            self._shares[columns] = self._share(Counter(self._labels_of(columns)))
        return self._shares[columns]

    def _labels_of(self, columns: tuple[int, ...]) -> list[int]:
        if columns not in self._labels:
            last = self._values[columns[-1]]
            before = self._labels_of(columns[:-1]) if columns[:-1] else [0] * len(last)
            numbers: dict[tuple[int, Hashable], int] = {}
            self._labels[columns] = [
                numbers.setdefault(pair, len(numbers)) for pair in zip(before, last, strict=True)
            ]
        return self._labels[columns]

    def _share(self, counts: Counter[int]) -> float:
        sampled = counts.total()
        if not sampled:
            return 0.0
        distinct: float = len(counts)
        if sampled < self._rows:
            times = Counter(counts.values())
            distinct += times[1] * (times[1] - 1) / (2 * (times[2] + 1))
        return max(0.0, 1 - distinct / max(self._rows, sampled))


def _best(columns: Sequence[int], lengths: Sequence[float], shares: _SharedRows) -> list[int]:
    """Return the best order of a few columns: that of each set extends the best one of a smaller set."""
    best: dict[tuple[int, ...], tuple[float, list[int]]] = {(): (0.0, [])}
    for _ in columns:
        larger: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        for chosen, (shared, order) in best.items():
            for column in columns:
                if column in chosen:
                    continue
                key = tuple(sorted((*chosen, column)))
                now = shared + lengths[column] * shares.of(key)
                known = larger.get(key)
                if known is None or now > known[0] or (now == known[0] and [*order, column] < known[1]):
                    larger[key] = now, [*order, column]
        best = larger
    ((_, order),) = best.values()
    return order


def _shared_bytes(order: Sequence[int], lengths: Sequence[float], shares: _SharedRows) -> float:
    return sum(
        lengths[column] * shares.of(tuple(sorted(order[: place + 1]))) for place, column in enumerate(order)
    )
