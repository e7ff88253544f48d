"""Orders the columns of `prompt.fields` so that rows share long prefixes, based on a sample of the input.

The idea to reorder the fields of a table for the prefix cache is from Liu et al., "Optimizing LLM Queries in
Relational Workloads" (arXiv:2403.05821).
"""

from collections.abc import Hashable, Mapping, Sequence

from pyroaring import BitMap64

from batchrunner.input.dataset import Dataset, rows_of
from batchrunner.input.order import stretches
from batchrunner.input.templates import field_line

LOOKED_AHEAD = 5
"""Number of columns that are tried in pairs at each step of choosing an order.

With this limit, sixty columns take 6 s. Trying all pairs would take minutes.
"""


def decide_fields(dataset: Dataset, columns: Sequence[str]) -> list[str]:
    """Return `columns` in the order in which the sampled rows share the longest prefixes.

    Workers that begin together must reach the same decision, so the sample has no time limit. Raises
    InputError if a file cannot be read.
    """
    values: dict[str, list[Hashable]] = {name: [] for name in columns}
    lengths = dict.fromkeys(columns, 0)
    for stretch in stretches(BitMap64(range(dataset.total_rows)), dataset.row_group_ends()):
        for batch in dataset.read(stretch, columns):
            for row in rows_of(batch, columns):
                # A text in place of values is the reason why the row cannot be read.
                if not isinstance(row, str):
                    for name in columns:
                        line = field_line(name, row[name])
                        # A hash is enough to compare lines, and saves memory.
                        values[name].append(hash(line))
                        # A line counts with its line break.
                        lengths[name] += len(line) + 1
    return choose_order(values, lengths)


def choose_order(values: Mapping[str, Sequence[Hashable]], lengths: Mapping[str, int]) -> list[str]:
    """Return the columns in an order in which rows share nearly as much text as possible.

    `values` has the values of each column in the sampled rows, and `lengths` their total length. A row shares
    a column with an earlier row if both have the same values in this column and all columns before it. So the
    number of rows that share a column is the number of rows minus the number of distinct combinations of
    these values. Each step appends the column that shares the most text together with the best column after
    it. Only the LOOKED_AHEAD columns that share most by themselves are tried.
    """
    ordered: list[str] = []
    remaining = [*values]
    rows = len(next(iter(values.values())))
    # For each row, a hash of its values in the columns that are already in order.
    prefixes: list[Hashable] = [0] * rows

    def shared_text(name: str, prefixes: Sequence[Hashable]) -> float:
        """Estimate the length of text that the cache saves if column `name` follows these prefixes.

        A row saves the column's text if an earlier row has the same prefix and the same value. The saved
        texts are assumed to have the column's mean length.
        """
        combinations = set(zip(prefixes, values[name], strict=True))
        share_of_rows = 1 - len(combinations) / max(1, rows)
        return lengths[name] * share_of_rows

    def gain(name: str, candidates: Sequence[str]) -> float:
        """Return the text that column `name` saves, plus what the best other candidate saves after it."""
        longer_prefixes = list(zip(prefixes, values[name], strict=True))
        gains_after = [shared_text(other, longer_prefixes) for other in candidates if other != name]
        return shared_text(name, prefixes) + max(gains_after, default=0.0)

    while remaining:
        by_shared_text = sorted(remaining, key=lambda name: shared_text(name, prefixes), reverse=True)
        candidates = by_shared_text[:LOOKED_AHEAD]
        best = max(candidates, key=lambda name: gain(name, candidates))
        prefixes = [hash(pair) for pair in zip(prefixes, values[best], strict=True)]
        remaining.remove(best)
        ordered.append(best)
    return ordered
