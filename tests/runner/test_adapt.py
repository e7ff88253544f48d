"""When a server is started again with other flags, in virtual time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batchrunner.core.engine_info import Incident
from batchrunner.output.samples import RunSample
from batchrunner.runner.adapt import GAIN_TO_COST, Adaptation
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import LoadSample, Prefills, Series
from batchrunner.tuning.adapt import EXPECTED
from batchrunner.tuning.memory import FlagMemory, Memory
from batchrunner.tuning.situation import ClientActivity, Situation

TICK_S = 2.0
START_S = 10.0


@dataclass(eq=False)
class Server:
    """A server with as many places as its flags say, 4 without; `rate` is what it puts out with some."""

    rate: Mapping[int, float]
    name: str = "replica 0"
    adapted: dict[str, Any] = field(default_factory=dict)
    named: str = "-"
    care: float = 0.3
    up: bool = True
    lost: Any = None
    start_s: float = START_S
    incidents: list[Incident] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    down_s: float = 0.0
    window_s: float = 0.0
    slow: float = 1.0
    prompts: float = 3.0
    """Prompt tokens for each output token."""
    fills: bool = True
    """Whether it has steady work."""
    chunk: int = 8192

    @property
    def places(self) -> int:
        return int(self.adapted.get("max-running-requests", 4))

    @property
    def speed(self) -> float:
        return self.rate[self.places] * self.slow

    def adapt(self, args: Mapping[str, Any], why: str) -> None:
        self.adapted, self.up, self.down_s = dict(args), False, START_S
        self.starts.append(self.places)

    def may_change(self, name: str) -> bool:
        return not name.startswith(self.named)

    def end_trial(self) -> None:
        pass

    # it is its own watch
    def begin(self) -> None:
        self.window_s = 0.0

    def take(self, _: RunSample, __: float) -> None:
        self.down_s -= TICK_S
        self.up = self.up or self.down_s <= 0
        self.window_s += TICK_S * (self.up and (self.fills or not self.starts))

    @property
    def busy_s(self) -> float:
        return self.window_s

    @property
    def situation(self) -> Situation:
        load, most = Series(), self.places
        for at in range(40):
            load.add("one", LoadSample(float(at), min(most, 16), 99, min(most, 16) / 16, most))
        care = self.adapted.get("schedule-conservativeness", self.care)
        chunk = int(self.adapted.get("chunked-prefill-size", self.chunk))
        arguments = {
            "max_running_requests": most, "schedule_conservativeness": care, "chunked_prefill_size": chunk,
        }  # fmt: skip
        log = Series(prefills=Prefills(passes=99, filled_waiting=99 * (chunk < 2048)))
        return Situation(load, log, Facts(arguments=arguments, ready=ServerReady(9000, chunk, most, 99)))


@dataclass
class Watch:
    """What is seen of a server; its log tells a rate."""

    server: Server

    def __getattr__(self, name: str) -> Any:
        if name == "rates":
            return self.server.speed, self.server.speed * (1 + self.server.prompts)
        return getattr(self.server, name)


def run_sample(**values: Any) -> RunSample:
    """Return the state of a run with these values."""
    usual = dict.fromkeys(RunSample.__struct_fields__, 0) | {"signals": [], "bands": {}, "task": "generate"}
    del usual["rollouts"], usual["background"]
    return RunSample(**usual | values)


def adaptation(directory: Path, *servers: Server, ends_at: float = 1e9) -> Adaptation:
    watches: Any = {server: Watch(server) for server in servers}
    return Adaptation(watches, FlagMemory(Memory(directory / "learned.jsonl"), "shape", []), ends_at)


def run(it: Adaptation, ticks: int, left_s: float | None, **sample: Any) -> None:
    usual = {"in_flight": 10, "rows_per_s": 10.0, "unsent": 999, "window": 20, "time_left_s": left_s}
    begins_at = sample.pop("time", 0.0)

    async def take_all() -> None:
        for tick in range(ticks):
            await it.take(run_sample(**usual | sample), begins_at + tick * TICK_S)

    asyncio.run(take_all())


GAINS, LOSES = {4: 40.0, 16: 120.0}, {4: 40.0, 16: 30.0}
LIFE_S = 1.0  # of a row, 10 in flight at 10 a second
NEEDED_S = GAIN_TO_COST * (START_S + LIFE_S) / (2 * EXPECTED)  # from 4 places to 16 are two doublings


@pytest.mark.parametrize(
    ("left_s", "sample", "restarts"),
    [
        (NEEDED_S * 1.01, {}, True),
        (NEEDED_S * 0.99, {}, False),
        (None, {}, False),
        (1e6, {"time": 1e9}, False),
        (1e6, {"unsent": 20}, False),
    ],
)
def test_a_step_has_to_pay(tmp_path: Path, left_s: float, sample: Any, *, restarts: bool) -> None:
    """Three times the start and the drain, at a twentieth of the time left a doubling; never near the end."""
    server = Server(GAINS)
    run(adaptation(tmp_path, server), 100, left_s, **sample)
    assert server.starts == ([16] if restarts else [])


def test_what_was_measured_counts_the_next_time(tmp_path: Path) -> None:
    """A step that gained threefold pays with far less time left; one that lost is not tried again."""
    for rates, starts in ((GAINS, [16]), (LOSES, [])):
        run(adaptation(tmp_path, Server(rates)), 100, 1e6)
        again = Server(rates)
        run(adaptation(tmp_path, again), 100, NEEDED_S / 10)
        assert again.starts == starts
        (tmp_path / "learned.jsonl").unlink()


@pytest.mark.parametrize(("named", "care"), [("-", 0.3), ("schedule", 1.0)])
def test_more_places_come_with_a_bolder_scheduler(named: str, care: float, tmp_path: Path) -> None:
    """In one restart, unless the job names how bold it is."""
    server = Server(GAINS, care=1.0, named=named)
    run(adaptation(tmp_path, server), 100, 1e6)
    assert server.starts == [16]
    assert server.adapted.get("schedule-conservativeness", server.care) == care


def test_two_signs_are_one_restart(tmp_path: Path) -> None:
    """Chunks and places together pay with less time left than either alone; if both lose, each is tried."""
    server = Server(GAINS, chunk=128)
    run(adaptation(tmp_path, server), 100, NEEDED_S * 0.4)
    assert server.starts == [16]
    assert server.adapted == {"chunked-prefill-size": 2048, "max-running-requests": 16}
    loser = Server(LOSES, chunk=128)
    run(adaptation(tmp_path / "new", loser), 150, 1e6)
    assert loser.starts == [16, 4, 4, 16, 4]


def test_replicas_are_compared_with_each_other(tmp_path: Path) -> None:
    """What slows all of them down is no loss of the step; one at a time is restarted."""
    servers = [Server(GAINS, f"replica {n}") for n in range(3)]
    it, most_down = adaptation(tmp_path, *servers), 0
    for _ in range(300):
        run(it, 1, 1e6)
        most_down = max(most_down, sum(not server.up for server in servers))
        for server in servers if servers[0].starts else ():
            server.slow = 0.2
    assert [server.starts for server in servers] == [[16]] * 3
    assert most_down == 1


def test_rates_of_unlike_rows_are_not_compared(tmp_path: Path) -> None:
    """Prompts that become longer make every server put out less: that is no loss of the step, nor a gain."""
    server = Server({4: 40.0, 16: 40.0})
    it = adaptation(tmp_path, server)
    for _ in range(100):
        run(it, 1, 1e6)
        if server.starts:
            server.slow, server.prompts = 0.5, 9.0
    assert server.starts == [16]
    assert not FlagMemory(Memory(tmp_path / "learned.jsonl"), "shape", []).gains


@pytest.mark.parametrize("rate", [GAINS, LOSES])
def test_a_trial_without_steady_work_ends(rate: Mapping[int, float], tmp_path: Path) -> None:
    """After some windows of time what was measured counts."""
    server = Server(rate, fills=False)
    run(adaptation(tmp_path, server), 200, 1e6)
    assert server.starts == ([16] if rate is GAINS else [16, 4])


def test_a_death_of_another_begins_the_trial_anew(tmp_path: Path) -> None:
    """What it did while it came up is not compared; one that is given up is left out from then on."""
    tried, other = servers = [Server(GAINS, f"replica {n}") for n in range(2)]
    it = adaptation(tmp_path, *servers)
    while not tried.starts:
        run(it, 1, 1e6)
    other.up, other.down_s, other.slow = False, 50.0, 0.1
    run(it, 20, 1e6)
    other.slow = 1.0
    run(it, 20, 1e6)
    assert FlagMemory(Memory(tmp_path / "learned.jsonl"), "shape", []).args == {"max-running-requests": 16}
    assert [server.starts for server in servers] == [[16]] * 2
    alone = Server(GAINS)
    run(adaptation(tmp_path / "new", alone, Server(GAINS, up=False, lost="lost", down_s=1e9)), 200, 1e6)
    assert alone.starts == [16]


def test_tasks_learn_from_each_other(tmp_path: Path) -> None:
    """Each finds something else: the next run starts with both, and none tries what another one has tried."""
    one, two = (FlagMemory(Memory(tmp_path / "learned.jsonl"), "shape", []) for _ in range(2))
    one.learn("a", 0.5, {"max-running-requests": 16})
    two.learn("b", 0.2, {"chunked-prefill-size": 2048})
    two.learn("c", -0.2)
    assert one.gains == {"a": 0.5, "b": 0.2, "c": -0.2}
    both = {"max-running-requests": 16, "chunked-prefill-size": 2048}
    assert FlagMemory(Memory(tmp_path / "learned.jsonl"), "shape", []).args == both


def test_a_loss_is_taken_back(tmp_path: Path) -> None:
    """Where the time left is worth it."""
    server = Server(LOSES)
    run(adaptation(tmp_path, server), 100, 1e6)
    assert server.starts == [16, 4]


@dataclass(eq=False)
class Drafting(Server):
    """A server whose answers repeat each other, on a card whose pool of 16 requests is all that it needs."""

    repeated: float = 3.0

    @property
    def drafts(self) -> bool:
        return self.adapted.get("speculative-algorithm") == "NGRAM"

    @property
    def speed(self) -> float:
        return self.rate[self.drafts]

    @property
    def situation(self) -> Situation:
        load = Series()
        for at in range(40):
            load.add("one", LoadSample(float(at), 12, 0, 0.4, 16))
        arguments = {
            "speculative_algorithm": "NGRAM" if self.drafts else None, "max_running_requests": 16,
            "speculative_ngram_external_sam_budget": 0,
        }  # fmt: skip
        facts = Facts(
            arguments=arguments, ready=ServerReady(9000, 8192, 16, 99), card="NVIDIA H100", weights_gb=16.0
        )
        client = ClientActivity(answers=400, repeated=self.repeated, speculates_exactly=True)
        return Situation(load, Series(), facts, client)


NGRAMS = {
    "speculative-algorithm": "NGRAM", "max-running-requests": 16, "speculative-ngram-external-sam-budget": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("repeated", "rate", "adapted", "starts"),
    [
        (3.0, {False: 40.0, True: 90.0}, NGRAMS, 1),
        (3.0, {False: 40.0, True: 30.0}, {}, 2),
        (1.1, {False: 40.0, True: 90.0}, {}, 0),
    ],
)
def test_drafts_from_earlier_answers_are_tried(
    repeated: float, rate: Mapping[int, float], adapted: dict[str, Any], starts: int, tmp_path: Path
) -> None:
    """If the replay promises a gain; they stay only if the server puts out more with them."""
    server = Drafting(rate, repeated=repeated)
    run(adaptation(tmp_path, server), 200, 1e6)
    assert (server.adapted, len(server.starts)) == (adapted, starts)
