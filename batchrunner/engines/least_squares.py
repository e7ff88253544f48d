"""Least squares for a few unknowns, none of which is negative: what each kind of work costs. Pure."""

from collections.abc import Collection, Sequence
from itertools import combinations

Row = Sequence[float]

ALIKE = 1e-12
"""Pivot below which, with columns of size 1, columns cannot be told apart."""
BETTER = 1e-9
"""Share of the sum of squares by which one more part must lower it to be used at all."""


class LeastSquares:
    """Sums over rows of amounts, each with the value that its amounts make up, for at most six parts.

    Columns are scaled to a mean square of 1, since amounts of different kinds differ by orders of magnitude.
    """

    def __init__(self, rows: Sequence[Row], values: Sequence[float]) -> None:
        """`rows` are the amounts, one column a part; `values` has a number for each row."""
        count, columns = max(1, len(rows)), range(len(rows[0]) if rows else 0)
        self._scales = [(sum(row[i] ** 2 for row in rows) / count) ** 0.5 for i in columns]
        scales = [scale or 1.0 for scale in self._scales]
        self._products = [
            [sum(row[i] * row[j] for row in rows) / (scales[i] * scales[j] * count) for j in columns]
            for i in columns
        ]
        self._sums = [
            sum(row[i] * value for row, value in zip(rows, values, strict=True)) / (scales[i] * count)
            for i in columns
        ]
        self._squares = sum(value**2 for value in values) / count

    def parts(self, *, without: Collection[int] = (), ridge: float = 0.0) -> list[float]:
        """Return the parts, none below 0, with the least sum of squares; those in `without` stay 0.

        `ridge` is a weight against large parts, with which parts that cannot be told apart share what they
        cost together; without one the first of them has it all.
        """
        used = [i for i, scale in enumerate(self._scales) if scale and i not in without]
        best, explained = [0.0] * len(self._scales), 0.0
        for some in (some for size in range(1, len(used) + 1) for some in combinations(used, size)):
            found = self._solved(some, ridge)
            if found is None or min(found) < 0:
                continue
            now = sum(part * self._sums[i] for part, i in zip(found, some, strict=True))
            if now > explained + BETTER * self._squares:
                best, explained = [0.0] * len(self._scales), now
                for part, i in zip(found, some, strict=True):
                    best[i] = part / self._scales[i]
        return best

    def _solved(self, some: Sequence[int], ridge: float) -> list[float] | None:
        """Solve for some parts by Gauss-Jordan elimination with pivots; None where they are alike."""
        rows = [[self._products[i][j] + ridge * (i == j) for j in some] + [self._sums[i]] for i in some]
        for column in range(len(rows)):
            pivot = max(range(column, len(rows)), key=lambda at: abs(rows[at][column]))
            if abs(rows[pivot][column]) <= ALIKE:
                return None
            rows[column], rows[pivot] = rows[pivot], rows[column]
            own = rows[column] = [value / rows[column][column] for value in rows[column]]
            for at in {*range(len(rows))} - {column}:
                rows[at] = [
                    value - rows[at][column] * mine for value, mine in zip(rows[at], own, strict=True)
                ]
        return [row[-1] for row in rows]
