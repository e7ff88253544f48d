"""The tokens that a row holds on average, by the rows that have ended."""

from __future__ import annotations

import pytest

from batchrunner.dispatch.concurrency.row_tokens import ENOUGH_ROWS, MEMORY_ROWS, RowTokens


def test_few_rows_tell_nothing() -> None:
    """Nor do rows without output."""
    tokens = RowTokens()
    for _ in range(ENOUGH_ROWS - 1):
        tokens.add(64, 100)
    assert tokens.held is None
    tokens.add(64, 100)
    assert tokens.held == pytest.approx(64 + 50)
    empty = RowTokens()
    for _ in range(1000):
        empty.add(64, 0)
    assert empty.held is None


def test_long_rows_count_for_the_time_that_they_run() -> None:
    """Rows with 10 and 1000 tokens come in equal number: nearly all that run at one moment are long ones."""
    tokens = RowTokens()
    for index in range(2 * ENOUGH_ROWS):
        tokens.add(0, 1000 if index % 2 else 10)
    assert tokens.held == pytest.approx((1000**2 + 10**2) / (2 * 1010), rel=0.01)


def test_old_rows_are_forgotten() -> None:
    """Where the input changes, the newest rows count."""
    tokens = RowTokens()
    for output in (100, 1000):
        for _ in range(5 * MEMORY_ROWS):
            tokens.add(0, output)
    assert tokens.held == pytest.approx(500, rel=0.02)


def test_rows_that_end_in_waves_are_averaged_over_a_whole_wave() -> None:
    """The short rows of 64 schedulers end first, 20,000 of them, and then the long ones: they count alike."""
    tokens = RowTokens()
    tokens.come_from(64)
    for output in (600, 1000) * 4:
        for _ in range(20_000):
            tokens.add(0, output)
    wave = (600**2 + 1000**2) / (2 * 1600)
    assert tokens.held == pytest.approx(wave, rel=0.05)
