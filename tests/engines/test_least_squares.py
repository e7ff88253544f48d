"""Least squares for a few unknowns, none of which is negative."""

from __future__ import annotations

import itertools
import random

import pytest

from batchrunner.engines.least_squares import LeastSquares


def made(parts: list[float], rows: int = 60, noise: float = 0.0) -> tuple[list[list[float]], list[float]]:
    """Return rows of random amounts, of very different sizes, and what they cost together."""
    draw = random.Random(3)
    amounts = [[draw.uniform(0, 10.0**place) for place in range(len(parts))] for _ in range(rows)]
    values = [sum(map(float.__mul__, parts, row)) * (1 + draw.uniform(-noise, noise)) for row in amounts]
    return amounts, values


def squares(rows: list[list[float]], values: list[float], parts: list[float]) -> float:
    """Return the sum of squares that parts leave."""
    return sum(
        (sum(map(float.__mul__, parts, row)) - value) ** 2 for row, value in zip(rows, values, strict=True)
    )


def test_exact_rows_give_the_parts_back() -> None:
    """Amounts that differ by four orders of magnitude do not matter, nor does a part that is 0."""
    parts = [0.01, 0.0, 2e-5, 3e-4, 1e-6]
    rows, values = made(parts)
    found = LeastSquares(rows, values)
    assert found.parts() == pytest.approx(parts, rel=1e-6, abs=1e-12)
    assert found.parts(without={0})[0] == 0


@pytest.mark.parametrize(
    "negative", [[-0.5, 1e-1, 2e-2, 1e-3], [0.3, -5e-2, -1e-2, 1e-3], [-1.0, -1.0, -1.0, -1.0]]
)
def test_none_is_negative_and_no_others_are_better(negative: list[float]) -> None:
    """Where the true parts are negative, no other parts from 0 on leave less; what was dropped may return."""
    rows, values = made(negative, noise=0.2)
    found = LeastSquares(rows, values).parts()
    assert min(found) >= 0
    left = squares(rows, values, found)
    for place, factor in itertools.product(range(4), (-1e-3, 1e-3)):
        other = list(found)
        other[place] = max(0.0, other[place] + factor / 10.0**place)
        assert squares(rows, values, other) >= left * (1 - 1e-9)


def test_what_is_alike_is_not_told_apart() -> None:
    """The first part has all of the cost, or with a weight against large parts both share it."""
    rows, values = [[2.0, 4.0, 0.0]] * 9, [8.0] * 9
    found = LeastSquares(rows, values)
    assert found.parts() == pytest.approx([4.0, 0.0, 0.0])
    shared = found.parts(ridge=1e-6)
    assert shared == pytest.approx([2.0, 1.0, 0.0], rel=1e-3)
    assert LeastSquares([], []).parts() == []
