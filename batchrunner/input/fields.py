"""Chooses an order of `prompt.fields` in which rows share long prefixes, from a sample of the input.

The idea to reorder the fields of a table for the prefix cache is that of Liu et al., "Optimizing LLM Queries
in Relational Workloads" (arXiv:2403.05821).
"""

from collections.abc import Hashable, Mapping, Sequence

from pyroaring import BitMap64

from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.order import stretches
from batchrunner.input.templates import field_line

LOOKED_AHEAD = 5
"""Number of columns that are tried in pairs at each step. Sixty columns take 6 s, but minutes if all pairs
are tried."""


def decide_fields(dataset: Dataset, columns: Sequence[str]) -> list[str]:
    """Return these columns in the order in which sampled rows share the longest prefixes; raises InputError.

    The sample has no time limit, because workers that begin together must reach the same decision.
    """
    values: dict[str, list[Hashable]] = {name: [] for name in columns}
    lengths = dict.fromkeys(columns, 0)
    for stretch in stretches(BitMap64(range(dataset.total_rows)), dataset.row_group_ends()):
        for batch in dataset.read(stretch, columns):
            for row in rows_of(batch, columns):
                if not isinstance(row, str):
                    for name in columns:
                        line = field_line(name, row[name])
                        values[name].append(hash(line))
                        lengths[name] += len(line) + 1
    return choose_order(values, lengths)


def choose_order(values: Mapping[str, Sequence[Hashable]], lengths: Mapping[str, int]) -> list[str]:
    """Return the columns in an order in which rows share nearly as much as possible.

    `values` has the values of each column in the sampled rows, and `lengths` their total length. A row shares
    a column with an earlier row if both have the same values in this column and in all columns before it. So
    the number of rows that share a column is the number of rows minus the number of different combinations of
    these values. Each step takes the column with which rows share most text, together with the best column
    behind it. Only the LOOKED_AHEAD columns that share most by themselves are tried.
    """
    ordered: list[str] = []
    remaining = [*values]
    rows = len(next(iter(values.values())))
    before: list[Hashable] = [0] * rows  # stands for the values of each row in the ordered columns

    def shared(name: str, before: Sequence[Hashable]) -> float:
        combinations = set(zip(before, values[name], strict=True))
        share_of_rows = 1 - len(combinations) / max(1, rows)
        return lengths[name] * share_of_rows

    def gain(name: str) -> float:
        before_next = list(zip(before, values[name], strict=True))
        of_next = [shared(other, before_next) for other in ahead if other != name]
        return shared(name, before) + max(of_next, default=0.0)

    while remaining:
        ahead = sorted(remaining, key=lambda name: shared(name, before), reverse=True)[:LOOKED_AHEAD]
        best = max(ahead, key=gain)
        before = [hash(pair) for pair in zip(before, values[best], strict=True)]
        remaining.remove(best)
        ordered.append(best)
    return ordered
