"""What a run learns of how carefully a server schedules, for its next start and for the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.recovery.diagnosis import EndedServer
from batchrunner.engines.recovery.healer import Healer, LearnedArgsFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "schedule-conservativeness"
LOAD = "Decode batch, #running-req: 8, #token: 890, token usage: {}, #queue-req: 9"
RETRACTS = "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio"
CALM = [f"[2026-11-22 10:{minute:02}:00] {LOAD.format(0.6)}" for minute in range(12)]


def retracting(minutes: int) -> list[str]:
    """Lines of a server that retracts four requests a minute."""
    times = [f"[2026-11-22 10:{minute:02}:{s:02}]" for minute in range(minutes) for s in (0, 15, 30, 45)]
    return [f"{at} {line}" for at in times for line in (LOAD.format(0.99), RETRACTS)]


@pytest.fixture(name="memory")
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnedArgsFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return LearnedArgsFile("model", "1 x H100", "0.5.23")


def next_run(memory: LearnedArgsFile, given: Mapping[str, Any] | None = None) -> Healer:
    healer = Healer(given or {}, memory, IncidentQueue())
    healer.recall()
    return healer


def test_a_server_that_holds_back_starts_less_careful_the_next_time(memory: LearnedArgsFile) -> None:
    """The next start that comes anyway has 0.3, and so has the next run."""
    healer = next_run(memory)
    assert healer.next_args == {}
    assert healer.admit_more() == 0.3
    assert healer.next_args == {NAME: 0.3}
    healer.outlived(EndedServer(CALM))
    assert next_run(memory).next_args == {NAME: 0.3}


def test_a_run_that_begins_with_it_takes_it_back_at_the_first_costs(memory: LearnedArgsFile) -> None:
    """Two minutes of retractions are enough there; a server without it is judged by five."""
    healer = next_run(memory)
    healer.admit_more()
    healer.outlived(EndedServer(CALM))
    bold = next_run(memory)
    bold.outlived(EndedServer(retracting(2), args=dict(bold.next_args)))
    normal = next_run(memory)
    assert normal.next_args == {NAME: 1.0}
    normal.outlived(EndedServer(retracting(2), args=dict(normal.next_args)))
    assert next_run(memory).next_args == {NAME: 1.0}
    normal.outlived(EndedServer(retracting(10), args=dict(normal.next_args)))
    assert next_run(memory).next_args == {NAME: 1.3}


@pytest.mark.parametrize(
    "given",
    [{NAME: 0.8}, {NAME: 1}, {"enable-dp-attention": True}, {"attn-dp-size": 4}],
)
def test_what_the_job_sets_is_not_changed(memory: LearnedArgsFile, given: dict[str, Any]) -> None:
    """Nor is what SGLang itself has lowered, with DP attention."""
    healer = next_run(memory, given)
    assert healer.admit_more() is None
    assert healer.next_args == {}
