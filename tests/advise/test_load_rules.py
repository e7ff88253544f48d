"""Bad flags of forward passes are found: limits on a pass, too few of them, passes that do not mix."""

from __future__ import annotations

from typing import Any

import pytest

from batchrunner.advise.rules import apply_all
from batchrunner.advise.situation import ClientActivity, Situation
from batchrunner.engines.flags import Flags, of_arguments
from batchrunner.engines.logs.reader import LogReader
from tests.support.advice import QUICK, said_of
from tests.support.sglang_logs import LogWriter

MIXES = {"enable_mixed_chunk": False, "prefill_decode_interval": 0, "prefill_max_requests": None}


def named(log: LogWriter, **client: Any) -> dict[str, dict[str, Any]]:
    """Return the flags that each rule names."""
    reader = LogReader(QUICK)
    for line in log.lines:
        reader.take(line)
    situation = Situation(reader.series, reader.series, reader.facts, ClientActivity(kind="server", **client))
    flags: Flags = of_arguments("0.5.23", reader.facts.arguments)
    return {advice.rule: advice.args for advice in apply_all(situation, flags) if advice.change}


@pytest.mark.parametrize(
    ("interval", "running", "output", "found"),
    [(64, 20, 20, True), (64, 63, 20, False), (64, 20, 2000, False), (0, 20, 20, False)],
    ids=["places are empty", "all are taken", "long outputs", "no interval"],
)
def test_prefill_that_is_too_rare(interval: int, running: int, output: int, *, found: bool) -> None:
    """Places stand empty while requests wait and the pool has room; no bolder scheduler is advised for it."""
    log = LogWriter().started(most=64, prefill_decode_interval=interval)
    for _ in range(30):
        log.prefill(1, n=20, new=500).decode(2, r=running, u=0.3)
    rules = named(log, outputs=600, output_tokens=600 * output)
    assert ("prefill-seldom" in rules) is found
    assert not found or rules["prefill-seldom"] == {"prefill-decode-interval": 6}
    assert not (found and "conservative" in rules)


@pytest.mark.parametrize(
    ("arguments", "passes", "tokens", "found"),
    [
        (MIXES, 20, 100, True),
        (MIXES, 1, 100, False),
        (MIXES, 20, 3000, False),
        ({**MIXES, "enable_mixed_chunk": True}, 20, 100, False),
        ({}, 20, 100, False),
    ],
    ids=["many small passes", "few", "large ones", "on already", "a version without it"],
)
def test_passes_that_do_not_mix(arguments: dict[str, Any], passes: int, tokens: int, *, found: bool) -> None:
    """Where times are not known, passes are counted: those of few tokens are as long as a decode step."""
    log = LogWriter().started(most=64, decode_log_interval=10, **arguments)
    for _ in range(30):
        log.prefill(passes, n=2, new=tokens).decode(1, r=62, u=0.5)
    rules = named(log, outputs=600, output_tokens=600 * 4)
    assert bool(rules.keys() & {"mixed-chunk", "small-prefills"}) is found


def test_few_places_come_before_mixed_chunks() -> None:
    """Where all places are taken and the pool has room, more of them are advised, and passes not mixed."""
    log = LogWriter().started(most=32, decode_log_interval=10, enable_mixed_chunk=False)
    for _ in range(30):
        log.prefill(20, n=2, new=100).decode(1, r=32, u=0.2, q=20)
    rules = named(log, outputs=600, output_tokens=600 * 4)
    assert "running-capped" in rules
    assert "mixed-chunk" not in rules


def test_small_chunks_on_a_noisy_machine() -> None:
    """Small chunks come first."""
    first = said_of("small_chunk")[0]
    assert first.args == {"chunked-prefill-size": 512}
