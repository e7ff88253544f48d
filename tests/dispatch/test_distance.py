"""How far followers stay behind their leader, corrected by what the cache holds."""

from __future__ import annotations

import pytest

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Completion
from batchrunner.dispatch.distance import FOLLOWERS_A_CHECK, ReuseDistance
from batchrunner.dispatch.pending_row import PendingRow
from tests.support.prompts import INFO, request

# The distance corrects itself


TIGHT = EngineInfo(kind="test", model="m", max_total_tokens=20_000, prefill_tokens=8192)
"""Its pool has no room for the beginnings of a whole pass: nobody knows what distance is best."""


def follow(lead: ReuseDistance, *, missed: int, computed_before: bool = False) -> list[str]:
    """Tell a lead of followers with 400 shared tokens, some of which missed them; return what it says."""
    parent = PendingRow(request(0, "x"), prefix_ready_at=1.0 if computed_before else 3.0)
    reasons = []
    for row in range(FOLLOWERS_A_CHECK):
        work = PendingRow(request(row, "x"), prompt_bytes=2000, leader=parent, shared_bytes=1600, sent_at=2.0)
        change = lead.record(work, Completion(["x"], ["stop"], [1], 500, 0 if row < missed else 390))
        reasons += [change.reason] if change else []
    return reasons


def test_followers_less_than_a_pass_behind_come_too_early() -> None:
    """Their beginning was not there, nor known to be computed: the distance widens, within the pool."""
    lead = ReuseDistance(TIGHT, 1)
    before = lead.tokens
    assert follow(lead, missed=20) == ["20 of 32 followers did not find their prefix in the cache"]
    assert before < lead.tokens <= 0.4 * 20_000


def test_a_change_that_made_it_worse_is_undone() -> None:
    """Where wider means more misses, their beginnings are evicted: the distance narrows."""
    lead = ReuseDistance(TIGHT, 1)
    follow(lead, missed=10)
    wider = lead.tokens
    follow(lead, missed=25)
    assert lead.tokens < wider


@pytest.mark.parametrize("info", [INFO, TIGHT])
def test_followers_that_come_too_late_narrow_the_distance(info: EngineInfo) -> None:
    """Their beginning had been computed, and is gone."""
    lead = ReuseDistance(info, 1)
    before = lead.tokens
    assert follow(lead, missed=20, computed_before=True)
    assert 0 < lead.tokens < before


def test_followers_that_hit_change_nothing() -> None:
    """As long as the cache holds what it should, the distance stays."""
    assert follow(ReuseDistance(INFO, 1), missed=3) == []


def test_single_misses_change_nothing() -> None:
    """A few of 32 may be chance; as many in the next check are not."""
    lead = ReuseDistance(TIGHT, 1)
    before = lead.tokens
    assert [follow(lead, missed=missed) for missed in (0, 4, 0, 5, 1)] == [[]] * 5
    assert lead.tokens == before
    lead = ReuseDistance(TIGHT, 1)
    assert [len(follow(lead, missed=5)) for _ in range(2)] == [0, 1]


def test_the_distance_is_bounded_by_the_pool() -> None:
    """A small KV pool could not hold the beginnings of a whole pass."""
    small = EngineInfo(kind="test", model="m", max_total_tokens=2000, prefill_tokens=8192)
    assert ReuseDistance(small, 1).tokens <= 0.52 * 2000
