"""The order of a prompt's fields is the one in which rows share most."""

from __future__ import annotations

import random
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

import pytest

from batchrunner.input.field_order import MOST_COLUMNS, choose_order
from tests.support.prompts import shared

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

WIDTHS = {"kind": 4, "place": 12, "title": 30, "text": 80}


def table(seed: int, rows: int, distinct: Sequence[int]) -> dict[str, list[str]]:
    """Return columns whose values have one width; a later column may depend on an earlier one."""
    dice = random.Random(seed)
    columns: dict[str, list[str]] = {}
    for (name, width), count in zip(WIDTHS.items(), distinct, strict=True):
        pool = [f"{dice.getrandbits(200):0{width}x}"[:width] for _ in range(count)]
        columns[name] = [dice.choice(pool) for _ in range(rows)]
    return columns


def shared_bytes(columns: dict[str, list[str]], order: Sequence[str]) -> int:
    """Return how many bytes rows share if all are cached, whole lines only."""
    lines = [[f"{name}: {columns[name][at]}\n" for name in order] for at in range(len(columns["text"]))]
    return _shared(sorted(lines))


def _shared(rows: list[list[str]]) -> int:
    total = 0
    for before, now in pairwise(rows):
        for one, other in zip(before, now, strict=True):
            if one != other:
                break
            total += len(one)
    return total


def lengths(columns: dict[str, list[str]]) -> list[float]:
    return [len(f"{name}: {values[0]}\n") for name, values in columns.items()]


@pytest.mark.parametrize("seed", range(30))
def test_no_order_shares_more(seed: int) -> None:
    """Where the sample is the whole input, each other order of the columns shares as much at most."""
    dice = random.Random(1000 + seed)
    columns = table(seed, 120, [dice.choice([1, 2, 5, 20, 60, 500]) for _ in WIDTHS])
    found = choose_order([*columns], [*columns.values()], lengths(columns), 120)
    most = max(shared_bytes(columns, order) for order in permutations(columns))
    assert shared_bytes(columns, found.columns) == most
    whole = 120 * sum(lengths(columns))
    assert found.share == pytest.approx(most / whole)
    assert found.written_share == pytest.approx(shared_bytes(columns, [*columns]) / whole)


def test_equally_good_orders_leave_it_as_written() -> None:
    """Where nothing is shared, and where all is, the given order stays: prompts do not change for nothing."""
    unique = {name: [f"{name} {at}" for at in range(50)] for name in "dbca"}
    same = {name: ["same"] * 50 for name in "dbca"}
    for columns in (unique, same):
        found = choose_order([*columns], [*columns.values()], [5.0] * 4, 50)
        assert found.columns == ("d", "b", "c", "a")
        assert found.share == found.written_share


def test_dependent_columns_stay_together() -> None:
    """A title that a film determines costs nothing behind it, however many there are."""
    films = [at % 40 for at in range(400)]
    columns: dict[str, list[Hashable]] = {
        "review": [f"review {at}" for at in range(400)], "stars": [at % 5 for at in films],
        "film": [*films], "plot": [f"plot of {film}" for film in films],
    }  # fmt: skip
    found = choose_order([*columns], [*columns.values()], [300.0, 4.0, 4.0, 900.0], 400)
    assert found.columns[-1] == "review"
    assert found.share == pytest.approx((904 * (1 - 40 / 400) + 4 * (1 - 5 / 400)) / 1208)


def test_a_sample_speaks_for_all() -> None:
    """In a small sample of many films few occur twice: their number is estimated, and a key stays a key."""
    dice = random.Random(3)
    films = [dice.randrange(5000) for _ in range(2000)]
    columns = {"id": list(range(2000)), "film": films}
    found = choose_order([*columns], [*columns.values()], [20.0, 400.0], 1_000_000)
    assert found.columns == ("film", "id")
    assert found.share == pytest.approx(400 / 420, abs=0.02)
    long_key = choose_order(["id", "film"], [*columns.values()], [900.0, 10.0], 1_000_000)
    assert long_key.columns == ("film", "id")


@pytest.mark.parametrize("count", [MOST_COLUMNS, MOST_COLUMNS + 5])
def test_many_columns(count: int) -> None:
    """More columns than can be compared in every order: those that share nothing still come last."""
    names = [f"c{at}" for at in range(count)]
    values = [[row if at % 3 == 0 else (row + at) % 8 for row in range(200)] for at in range(count)]
    found = choose_order(names, values, [10.0] * count, 200)
    assert sorted(found.columns) == sorted(names)
    last = found.columns[-len(names[::3]) :]
    assert {*last} == {*names[::3]}
    assert found.share > found.written_share


def test_an_empty_sample() -> None:
    """A filter that no sampled row passes leaves the order as it is."""
    found = choose_order(["b", "a"], [[], []], [0.0, 0.0], 0)
    assert (found.columns, found.share, found.rows_sampled) == (("b", "a"), 0.0, 0)


def test_the_measure_is_that_of_prefixes() -> None:
    """Whole lines are what sorted prompts share, but for the beginnings of unequal values."""
    columns = table(5, 200, [3, 9, 40, 500])
    found = choose_order([*columns], [*columns.values()], lengths(columns), 200)
    prompts = [
        "".join(f"{name}: {columns[name][at]}\n" for name in found.columns).encode() for at in range(200)
    ]
    assert shared(prompts) >= shared_bytes(columns, found.columns)
    assert shared(prompts) / sum(map(len, prompts)) == pytest.approx(found.share, abs=0.1)
