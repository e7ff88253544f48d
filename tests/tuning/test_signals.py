"""Each sign is decided once: status line, advice, changes during a run and tuning agree on every trace."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from batchrunner.core.engine_info import QueueBand, SchedulerLoad
from batchrunner.dispatch.concurrency.law import Controller, Reading
from batchrunner.sglang.flags import Flags
from batchrunner.sglang.logs.reader import Facts, LogReader
from batchrunner.sglang.logs.series import LoadSample, Series
from batchrunner.tuning.adapt import ADAPTING_RULES
from batchrunner.tuning.flags import Server
from batchrunner.tuning.measurement import TrialSigns, TrialWatch
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.signals import (
    GUIDES,
    SIGNS,
    Corner,
    admits_too_few,
    corner_of,
    holds_back,
    is_at_cap,
    is_full,
    is_overfull,
    retracts_often,
    share,
    waits_beside_room,
)
from batchrunner.tuning.situation import Situation
from batchrunner.tuning.space import SEEN

LOGS = Path(__file__).parents[1] / "support" / "logs"
STEP_S = 0.5
READINGS = 1200
"""Readings of a trace, which is played again and again: ten minutes."""


def load(
    running: int = 100,
    queue: int = 300,
    usage: float = 0.5,
    max_running: int | None = 256,
    state_usage: float = 0.0,
) -> LoadSample:
    return LoadSample(None, running, queue, usage, max_running, state_usage=state_usage)


def recorded(name: str) -> list[LoadSample]:
    """The readings of a real server: from its log, or as the law read them."""
    path = LOGS / name
    if path.suffix == ".log":
        return LogReader().read(path).series.samples
    told = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [(running, queue, usage, most) for _, running, queue, _, _, usage, _, most, *_ in told]
    return [load(*row) for row in rows if row[0]]


TRACES: dict[str, list[LoadSample]] = {
    "holds back": [load()],
    "holds back, its cap not known": [load(max_running=None)],
    "the pool is well used for moments": [load(usage=0.48), load(usage=0.92)],
    "the pool is nearly always full": [load(usage=0.95)] * 9 + [load()],
    "holds back in a third of the time": [load(queue=0, usage=0.6)] * 2 + [load()],
    "holds back in a fifth of the time": [load(queue=0, usage=0.6)] * 4 + [load()],
    "well used": [load(usage=0.95)],
    "full, and nothing waits": [load(queue=0, usage=0.95)],
    "the queue is short": [load(queue=0)],
    "at the cap": [load(running=256)],
    "nearly at the cap": [load(running=244)],
    "a cap of one": [load(running=1, max_running=1)],
    "a place of a small cap is being filled": [
        load(running=7, max_running=8),
        load(running=8, max_running=8),
    ],
    "states have no room": [load(state_usage=0.95)],
    "states cap a small pool, and a place is being filled": [
        load(running=8, max_running=9, state_usage=8 / 9)
    ],
    "both pools are full": [load(usage=0.95, state_usage=0.95)],
    "the flag caps, and half of the states are free": [load(running=256, state_usage=0.5)],
    **{name: recorded(name) for name in sorted(path.name for path in LOGS.glob("*.log"))},
    "h200_slots_full.readings": recorded("h200_slots_full.readings"),
}


TOO_FEW = {
    "holds back",
    "holds back, its cap not known",
    "the pool is well used for moments",
    "holds back in a third of the time",
    "real_conservative.log",
    "real_after_advice.log",
    "real_retractions.log",
    "real_waves.log",
}
"""Traces of servers that admit too few, where they retract nothing."""


def law_of(samples: Sequence[LoadSample], retractions_a_reading: float = 0.0) -> Controller:
    """The law after it has read a trace for ten minutes."""
    law = Controller("one", 400, QueueBand(), most=10_000, now=0.0)
    ended = 0.0
    for at, sample in enumerate(itertools.islice(itertools.cycle(samples), READINGS), 1):
        ended += sample.running / 80
        in_flight = max(law.window, sample.running + sample.queue)
        reading = Reading(
            running=sample.running,
            queue=sample.queue,
            in_flight=in_flight,
            ended=ended,
            usage=sample.usage,
            retractions=int(at * retractions_a_reading),
            max_running=sample.max_running,
            state_usage=sample.state_usage,
        )
        law.sample(at * STEP_S, reading)
    return law


def situation_of(samples: Sequence[LoadSample], retractions_a_reading: float = 0.0) -> Situation:
    """What advice and changes during a run read of a trace."""
    series = Series(retractions=int(READINGS * retractions_a_reading))
    for at, sample in enumerate(itertools.islice(itertools.cycle(samples), READINGS)):
        series.add("one", sample._replace(at=at * STEP_S, unsent=1000))
    return Situation(series, Series(), Facts(arguments={"schedule_conservativeness": 1.0}))


def trial_of(samples: Sequence[LoadSample], retractions_a_reading: float = 0.0) -> TrialSigns:
    """What `batchrun tune` reads of a trace."""
    watch = TrialWatch()
    watch.record_load(0.0, [loads_of(samples[0])])
    watch.rows = samples[0].running
    for at, sample in enumerate(itertools.islice(itertools.cycle(samples), READINGS), 1):
        watch.record_load(at * STEP_S, [loads_of(sample)])
        watch.row_ended(1, 0, 1, int(at * retractions_a_reading) - int((at - 1) * retractions_a_reading))
    return watch.result("measured", "", READINGS * STEP_S, 0.0).signs


def loads_of(sample: LoadSample) -> SchedulerLoad:
    return SchedulerLoad(
        scheduler="one",
        source="simulated",
        running=sample.running,
        queue=sample.queue,
        token_usage=sample.usage,
        max_running=sample.max_running,
        state_usage=sample.state_usage,
    )


@pytest.mark.parametrize("retractions_a_reading", [0.0, 0.2], ids=["calm", "retracts"])
@pytest.mark.parametrize("name", TRACES)
def test_all_agree_whether_the_server_admits_too_few(name: str, retractions_a_reading: float) -> None:
    """One word for each trace: that of the status line, of advice, of a run's own changes and of tuning."""
    samples = TRACES[name]
    situation = situation_of(samples, retractions_a_reading)
    trial = trial_of(samples, retractions_a_reading)
    server = Server(Facts())

    expected = name in TOO_FEW and not retractions_a_reading
    assert situation.admits_too_few is expected
    law = law_of(samples, retractions_a_reading)
    assert (law.corner is Corner.HELD) is expected
    assert SEEN["held"](trial, server) is expected

    advice = {each.rule for each in apply_all(situation, Flags()) if each.change}
    is_memory_bound = share(situation.load.samples, "full") >= GUIDES.peaks  # a bolder server does not help
    assert ("conservative" in advice) is (expected and not is_memory_bound)
    assert "conservative" in ADAPTING_RULES  # changes during a run are this advice


@pytest.mark.parametrize("name", TRACES)
def test_all_agree_whether_the_state_pool_is_the_limit(name: str) -> None:
    """A hybrid model's second pool has a sign of its own, which is neither the cap's nor the KV pool's."""
    samples = TRACES[name]
    expected = "states" in name and "the flag" not in name
    situation = situation_of(samples)
    assert situation.waits_for_states is expected
    assert (law_of(samples).corner is Corner.STATES) is expected
    assert SEEN["states"](trial_of(samples), Server(Facts())) is expected
    advice = {each.rule for each in apply_all(situation, Flags()) if each.change}
    assert ("states-full" in advice) is expected
    assert not expected or not advice & {"running-capped", "conservative"}
    assert "states-full" in ADAPTING_RULES


@pytest.mark.parametrize("sign", ["empty", "capped", "full", "kv_bound", "at_cap", "states"])
@pytest.mark.parametrize("name", TRACES)
def test_advice_and_tuning_measure_the_same_shares(name: str, sign: str) -> None:
    """A trial's signs are those of its readings up to the last in which a request waited."""
    samples = TRACES[name]
    assert trial_of(samples).shares[sign] == pytest.approx(
        share(situation_of(samples).load.samples, sign), abs=0.02
    )


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (load(), {"waits", "holds back"}),
        (load(max_running=None), {"waits", "holds back"}),
        (load(queue=0), set()),
        (load(usage=0.9), {"full"}),
        (load(usage=0.899), {"waits", "holds back"}),
        (load(running=256), {"waits", "cap"}),
        (load(running=244), {"waits", "cap"}),
        (load(running=243), {"waits", "holds back"}),
        (load(running=7, max_running=8), {"waits", "cap"}),
        (load(running=6, max_running=8), {"waits", "holds back"}),
        (load(running=0, max_running=1), {"waits", "holds back"}),
        (load(running=1, max_running=1), {"waits", "cap"}),
        (load(running=256, queue=0, usage=0.95), {"full", "cap"}),
    ],
)
def test_the_signs_of_one_reading(sample: LoadSample, expected: set[str]) -> None:
    """Token usage from 0.9 is full; 95 % of the cap, or one less than it, is the cap."""
    tests = {
        "waits": waits_beside_room,
        "holds back": holds_back,
        "full": is_full,
        "cap": is_at_cap,
    }
    assert {name for name, shows in tests.items() if shows(sample)} == expected
    assert SIGNS["conservative"](sample) is holds_back(sample)
    assert SIGNS["capped"](sample) is ("waits" in expected and "cap" in expected)


@pytest.mark.parametrize(
    ("share_held", "retracts", "expected"), [(0.25, False, True), (0.24, False, False), (1.0, True, False)]
)
def test_a_sign_counts_from_a_quarter_of_the_readings(
    share_held: float, *, retracts: bool, expected: bool
) -> None:
    """A server that retracts admits enough."""
    assert admits_too_few(share_held=share_held, retracts=retracts) is expected


@pytest.mark.parametrize(
    ("sample", "overfull", "share_held", "expected"),
    [
        (load(queue=0), False, 0.0, Corner.SHORT),
        (load(queue=0, usage=0.95), False, 0.0, Corner.FULL),
        (load(usage=0.95), False, 0.0, Corner.GOOD),
        (load(usage=0.95), True, 0.0, Corner.FILLING),
        (load(), True, 1.0, Corner.FILLING),
        (load(), False, 0.3, Corner.HELD),
        (load(), False, 0.2, None),
    ],
)
def test_the_state_that_users_are_shown(
    sample: LoadSample, *, overfull: bool, share_held: float, expected: Corner | None
) -> None:
    """Retractions count first, then a server that holds back, then pool and queue."""
    assert corner_of(sample, overfull=overfull, share_held=share_held) is expected


def test_retractions_are_counted_by_the_minute() -> None:
    """About one is fine, over a run and lately."""
    assert [retracts_often(per_min) for per_min in (1.0, 1.1)] == [False, True]
    assert [is_overfull(recent) for recent in (2.9, 3.0)] == [False, True]


@pytest.mark.parametrize("corner", Corner)
def test_each_state_has_its_words(corner: Corner) -> None:
    """For the status line, and behind the figures of an event."""
    assert corner.words
    assert corner.meaning.startswith((":", ",", " "))
