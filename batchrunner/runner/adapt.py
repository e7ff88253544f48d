"""Flag tuning during a run: launched servers change their flags one step at a time, by the rules of advice.

Advice on a window of steady work names a step. It takes all flags at once, since a restart costs the same
for one and for several. A step is worth a restart if its gain over the remaining time is more than three
times the cost of the restart. Then one server restarts with the step, and its output tokens per second are
compared with those before, and with the other servers' meanwhile. Rows may become longer or shorter, so the
rate with prompt tokens has to agree. A step that gains is kept, and the other servers follow one by one. A
step that loses is undone where that pays, and its rules are tried alone. All results are remembered. There is
no clock here: each load sample is a step in time.
"""

import logging
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from batchrunner.core.engine_info import Incident
from batchrunner.core.timing import TIMING
from batchrunner.engines.base import Engine
from batchrunner.engines.launched.fleet import LaunchedFleet
from batchrunner.engines.launched.server import SGLangServer
from batchrunner.output.run_dir import RunDir
from batchrunner.sglang.flags import command_line, of_arguments
from batchrunner.tuning.flags import LESS_CONSERVATIVE, next_setting
from batchrunner.tuning.from_run import ServerWatch
from batchrunner.tuning.load_rules import conservativeness
from batchrunner.tuning.memory import FlagMemory
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.situation import Situation

log = logging.getLogger(__name__)

EXPECTED = 0.05
"""Gain of a step that was never tried with this model, machine and shape of job, for each doubling of its
flag: 64 running requests instead of 4 promise more than 8 do."""
WORTH = 3.0
"""Multiple of a restart's cost that a step must gain."""
LEAST_GAIN = 0.02
"""Least gain that is not noise."""
MOST_WINDOWS = 4
"""Windows after which a trial without steady work ends; each is longer by the life of a row."""
CARE = "schedule-conservativeness"
"""Flag that is lowered with a higher cap: requests that the cap holds back do not show what else does."""
STEPS = frozenset({
    "conservative", "running-capped", "memory-left", "cuda-graph", "prefill-full", "running-low",
    "long-prompts", "retractions", "pool-small",
})  # fmt: skip
"""Rules of advice whose flags change during a run."""


def adaptation_of(engine: Engine, run_dir: RunDir, ends_at: float) -> "Adaptation | None":
    """Return the flag tuning of an engine's servers; None where their flags do not change."""
    if not isinstance(engine, LaunchedFleet) or engine.memory is None:
        return None
    servers = {s: ServerWatch(run_dir, s.url, s.log_path, s.log_begins) for s in engine.servers}
    return Adaptation(servers, engine.memory, ends_at)


class Step(NamedTuple):
    """A change of flags or variables."""

    name: str
    """The rules that call for it, with the values before it."""
    args: Mapping[str, Any]
    why: str


def _doublings(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Return the largest change of a number in doublings, up or down; at least 1."""
    numbers = [(old[name], value) for name, value in new.items() if isinstance(value, (int, float))]
    return max([1.0, *(abs(math.log2(value / before)) for before, value in numbers if before and value > 0)])


def _may_be_bolder(s: Situation) -> bool:
    """Tell whether a scheduler reserves more than the guides advise for outputs of unknown length."""
    return conservativeness(s) > LESS_CONSERVATIVE and not (s.client and s.client.ignore_eos)


class Adaptation:
    """The flag tuning of one run, driven by its load samples."""

    def __init__(
        self, servers: Mapping[SGLangServer, ServerWatch], memory: FlagMemory, ends_at: float
    ) -> None:
        """`ends_at` is the time of the run's deadline."""
        self._servers = servers
        self._memory = memory
        self._ends_at = ends_at
        self._sample: Mapping[str, Any] = {}
        self._work = self._go()

    def take(self, sample: Mapping[str, Any]) -> None:
        """Use a load sample, the event `sample` with its time."""
        self._sample = sample
        for watch in self._servers.values():
            watch.take(sample)
        next(self._work)

    def stop(self) -> None:
        """Restart no server any more: the run stops."""
        for server in self._servers:
            server.stay()

    def _go(self) -> Iterator[None]:
        while True:
            yield from self._window()
            for server, watch in self._servers.items():
                server.keep()
                step = None if server.lost else self._next_step(server, watch)
                if step is not None:
                    yield from self._try(server, step)
                    break

    @property
    def _is_calm(self) -> bool:
        """Whether no server is starting."""
        return all(server.up or server.lost for server in self._servers)

    def _window(self, most_s: float = math.inf) -> Iterator[None]:
        """Wait until all servers are up, then for a window of steady work, or `most_s` seconds."""
        ends_at, is_full = math.inf, False
        while not is_full:
            while not self._is_calm:
                yield
            ends_at = min(ends_at, self._sample["time"] + most_s)
            for watch in self._servers.values():
                watch.begin()
            while self._is_calm and not is_full:
                yield
                busy_s = [watch.busy_s for server, watch in self._servers.items() if not server.lost]
                is_full = min(busy_s, default=0.0) >= TIMING.adapt or self._sample["time"] > ends_at

    @property
    def _life_s(self) -> float:
        """Mean seconds from sending a row to its end."""
        return float(self._sample["in_flight"] / max(self._sample["rows_per_s"], 1e-9))

    def _next_step(self, server: SGLangServer, watch: ServerWatch) -> Step | None:
        """Return the step of all rules, or the first rule's that pays alone; None where no step pays."""
        situation = watch.situation
        facts = situation.facts
        flags = of_arguments(facts.version, facts.arguments)
        steps = list[tuple[Step, float]]()
        for advice in apply_all(situation, flags):
            args = {**advice.args, **advice.env}
            if advice.rule == "running-capped" and server.may_change(CARE) and _may_be_bolder(situation):
                args |= next_setting("held", CARE, situation.server, flags)
            old = {name: situation.server.now(name) for name in args}
            name = f"{advice.rule}, {command_line(old)}"
            gain = self._memory.gains.get(name, EXPECTED * _doublings(old, args))
            if args and gain > 0 and advice.rule in STEPS and all(map(server.may_change, args)):
                steps.append((Step(name, args, advice.sign), gain))
        if not steps:
            return None
        single_steps = [step for step, _ in steps]
        args = dict(ChainMap(*(dict(step.args) for step in single_steps)))
        together = Step(
            "; ".join(step.name for step in single_steps), args, "; ".join(step.why for step in single_steps)
        )
        gain = self._memory.gains.get(together.name, sum(gain for _, gain in steps))
        return next((step for step, gain in [(together, gain), *steps] if self._pays(server, gain)), None)

    def _pays(self, server: SGLangServer, gain: float) -> bool:
        """Tell whether a gain is worth a restart now, which drains the server and starts it."""
        sample = self._sample
        cost_s = server.start_s + min(server.start_s, self._life_s)
        left_s = min(sample["time_left_s"] or 0.0, self._ends_at - sample["time"])
        # A restart in the tail would only delay it.
        return self._is_calm and sample["unsent"] > sample["window"] and gain * left_s > WORTH * cost_s

    def _try(self, server: SGLangServer, step: Step) -> Iterator[None]:
        """Try a step with one server; then let the others follow, or undo it."""
        old, new = server.adapted, {**server.adapted, **step.args}
        before = {each: watch.rates for each, watch in self._servers.items() if all(watch.rates)}
        server.adapt(new, step.why)
        yield from self._window(MOST_WINDOWS * (TIMING.adapt + self._life_s))
        server.keep()
        gain = self._gain(server, before)
        is_good = gain >= LEAST_GAIN
        outcome = "kept" if is_good else "kept, as another start costs more"
        if not (lives := server.adapted == new):
            gain, is_good, outcome = -1.0, False, "dropped"
        if gain:
            self._memory.learn(step.name, gain, step.args if is_good else {})
        restarts = {each: {**each.adapted, **step.args} for each in self._servers if is_good}
        restarts.pop(server, None)
        if lives and self._pays(server, -gain):
            restarts, outcome = {server: old}, "taken back"
        why = f"{command_line(step.args)}: {1 + gain:.2f} x the output tokens a second: {outcome}"
        if not gain:
            why = f"{command_line(step.args)}: its gain is unclear: {outcome}"
        log.warning("%s: %s", server.name, why)
        server.incidents.append(Incident("adapted", server.name, why, {"new": step.args, "gain": gain}))
        for each, args in restarts.items():
            if self._pays(each, abs(gain)):
                each.adapt(args, f"{server.name} showed {1 + gain:.2f} x")
                while not self._is_calm:
                    yield
                each.keep()

    def _gain(self, server: SGLangServer, before: Mapping[SGLangServer, tuple[float, ...]]) -> float:
        """Return a server's gain over that of the others; 0 where the two rates disagree or are unknown."""
        now = {each: watch.rates for each, watch in self._servers.items() if all(watch.rates)}
        faster = {
            each: [new / old for new, old in zip(now[each], before[each], strict=True)]
            for each in now.keys() & before.keys()
        }
        if server not in faster:
            return 0.0
        ratios = faster.pop(server)
        by_others = zip(*faster.values(), strict=True) if faster else [(1.0,) for _ in ratios]
        gains = [
            rate / fmean(ratios_of_others) - 1
            for rate, ratios_of_others in zip(ratios, by_others, strict=True)
        ]
        return min(gains, key=abs) if min(gains) * max(gains) > 0 else 0.0
