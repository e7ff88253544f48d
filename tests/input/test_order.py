"""Whether sorting rows is worth its price, and the row groups of the sorted copy."""

import errno
import random
from itertools import pairwise
from math import exp
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.input.order import STRETCHES, WINDOW_ROWS, decide
from batchrunner.input.prompt_bytes import common_length
from batchrunner.input.sorted_copy import connect, cut_into_groups
from tests.support.inputs import document, shuffled


def prompts(texts: list[str], window: int = 1024) -> list[list[bytes]]:
    """Return texts as a sample that is everything."""
    return [[text.encode() for text in texts[at : at + window]] for at in range(0, len(texts), window)]


IN_COLUMNS = [f"{document(row // 8)} {row}" for row in range(4096)]
UNRELATED = [document(row) for row in range(4096)]
ONE_SYSTEM = [document(-1) * 3 + document(row) for row in range(4096)]


@pytest.mark.parametrize(
    ("texts", "order"),
    [
        (UNRELATED, "input"),
        (IN_COLUMNS, "input"),
        (shuffled(4096, 512), "prefix"),
        (ONE_SYSTEM, "input"),
        (["x"] * 4096, "input"),
        ([""] * 10, "input"),
        ([], "input"),
    ],
)
def test_what_sorting_gains(texts: list[str], order: str) -> None:
    """Where the sample is everything both shares are exact, and the order is the one that pays."""
    choice = decide(prompts(texts), len(texts))
    assert choice.order == order
    whole = [text.encode() for text in sorted(texts)]
    best = sum(common_length(one, other) for one, other in pairwise(whole)) / max(1, sum(map(len, whole)))
    assert choice.sorted_share == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize(("rows", "each"), [(200_000, 2), (200_000, 8), (200_000, 100), (10_000_000, 8)])
def test_what_a_sample_tells_of_the_rest(rows: int, each: int) -> None:
    """Few mates of a row are in a sample; from how many are, the share of all is told to within a quarter."""
    made = random.Random(each)
    texts = [f"{document(made.randrange(rows // each))} {n}" for n in range(STRETCHES * WINDOW_ROWS)]
    choice = decide(prompts(texts), rows)
    assert choice.order == "prefix"
    assert choice.sorted_share == pytest.approx(0.99 * (1 - (1 - exp(-each)) / each), rel=0.25)
    assert choice.input_share == pytest.approx(0, abs=0.4)


@pytest.mark.parametrize(("rows", "each"), [(200_000, 2), (200_000, 8), (200_000, 1000), (1_000_000, 1000)])
def test_equal_rows_are_a_reason_to_sort(rows: int, each: int) -> None:
    """Short prompts that are there several times, far apart, are sent once if they are sorted."""
    made = random.Random(each)
    texts = [f"{made.randrange(rows // each)} is one" for _ in range(STRETCHES * WINDOW_ROWS)]
    choice = decide(prompts(texts), rows, prompts(texts))
    assert choice.order == "prefix"
    assert "of the rows equal an earlier row and share its answer" in choice.why
    assert choice.sorted_equal == pytest.approx(1 - (1 - exp(-each)) / each, rel=0.25)
    assert decide(prompts(texts), rows).order == "input"


@given(st.lists(st.integers(0, 20 << 20), max_size=100), st.integers(1, 50))
def test_row_groups_fit_into_memory(sizes: list[int], wanted: int) -> None:
    """They hold all rows, as many as wanted; those of one group have 32 MiB at most, or are one row."""
    cuts = list(cut_into_groups(sizes, wanted))
    assert sum(count for count, _ in cuts) == len(sizes)
    assert all(count <= wanted and (size <= 32 << 20 or count == 1) for count, size in cuts)


@pytest.mark.parametrize(
    ("limits", "number"),
    [
        ("SET memory_limit = '1MB'", errno.ENOMEM),
        ("SET memory_limit = '20MB'; SET max_temp_directory_size = '1MB'", errno.ENOSPC),
    ],
    ids=["memory", "disk"],
)
def test_what_a_sort_lacks(limits: str, number: int, tmp_path: Path) -> None:
    """DuckDB calls a full disk "out of memory" too, but the number of the error does not."""

    def sort() -> None:
        with connect(tmp_path) as db:
            db.execute(limits)
            db.execute("CREATE TABLE sorted AS SELECT hash(range) AS key FROM range(3_000_000) ORDER BY key")

    with pytest.raises(OSError, match="Out of Memory Error: ") as refusal:
        sort()
    assert refusal.value.errno == number
