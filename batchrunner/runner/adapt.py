"""Flag tuning during a run: launched servers change their flags one step at a time, by the rules of advice.

Advice on a window of steady work names a step. The first step changes all flags at once, since a restart
costs the same for one flag and for several. A step is worth a restart if its gain over the remaining time is
more than three times the cost of the restart. Then one server restarts with the step. Its output tokens/s are
compared with its earlier rate, and with the change of the other servers' rates. Rows may become longer or
shorter, so the rate with prompt tokens has to agree. If the step gains, it is kept, and the other servers
follow one by one. If it loses, it is undone where that pays, and each of its rules is tried alone. All
results are remembered. This module reads no clock: each load sample comes with its time.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping

from batchrunner.core.engine_info import Incident
from batchrunner.core.timing import TIMING
from batchrunner.engines.base import Engine
from batchrunner.engines.launched.fleet import LaunchedFleet
from batchrunner.engines.launched.server import SGLangServer
from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import RunSample
from batchrunner.sglang.flags import command_line
from batchrunner.tuning.adapt import Step, gain_over_others, steps_for
from batchrunner.tuning.from_run import ServerWatch
from batchrunner.tuning.measurement import LEAST_GAIN
from batchrunner.tuning.memory import FlagMemory

log = logging.getLogger(__name__)

GAIN_TO_COST = 3.0
"""Least ratio of a step's gain to the cost of a restart."""
MOST_WINDOWS = 4
"""Windows after which a trial ends even without steady work; each is extended by the life of a row."""


def adaptation_of(engine: Engine, run_dir: RunDir, ends_at: float) -> "Adaptation | None":
    """Return the flag tuning of an engine's servers; None where their flags do not change."""
    if not isinstance(engine, LaunchedFleet) or engine.memory is None:
        return None
    servers = {s: ServerWatch(run_dir, s.url, s.log_path, s.log_begins) for s in engine.servers}
    return Adaptation(servers, engine.memory, ends_at)


class Adaptation:
    """The flag tuning of one run, driven by its load samples."""

    def __init__(
        self, servers: Mapping[SGLangServer, ServerWatch], memory: FlagMemory, ends_at: float
    ) -> None:
        """`ends_at` is the time of the run's deadline."""
        self._servers = servers
        self._memory = memory
        self._ends_at = ends_at
        self._sample: RunSample
        self._now: float
        """Time of the newest load sample, in seconds of the monotonic clock."""
        self._work = self._go()

    async def take(self, sample: RunSample, now: float) -> None:
        """Process a load sample, read at `now` on the monotonic clock.

        Logs and parts are read in a thread. One sample must be processed before the next is taken.
        """
        self._sample, self._now = sample, now
        for watch in self._servers.values():
            await asyncio.to_thread(watch.take, sample, now)
        next(self._work)

    def stop(self) -> None:
        """Forbid further restarts, because the run stops."""
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
        """Wait until all servers are up, then for a window of steady work, at most `most_s` seconds."""
        ends_at, is_full = math.inf, False
        while not is_full:
            while not self._is_calm:
                yield
            ends_at = min(ends_at, self._now + most_s)
            for watch in self._servers.values():
                watch.begin()
            while self._is_calm and not is_full:
                yield
                busy_s = [watch.busy_s for server, watch in self._servers.items() if not server.lost]
                is_full = min(busy_s, default=0.0) >= TIMING.adapt or self._now > ends_at

    @property
    def _life_s(self) -> float:
        """Mean seconds from sending a row to its end."""
        return self._sample.in_flight / max(self._sample.rows_per_s, 1e-9)

    def _next_step(self, server: SGLangServer, watch: ServerWatch) -> Step | None:
        """Return the combined step if it pays, else the first single step that pays; None if none does."""
        steps = steps_for(watch.situation, self._memory.gains, server.may_change)
        return next((step for step, gain in steps if self._pays(server, gain)), None)

    def _pays(self, server: SGLangServer, gain: float) -> bool:
        """Tell whether a gain is worth a restart now. A restart drains the server, then starts it."""
        sample = self._sample
        cost_s = server.start_s + min(server.start_s, self._life_s)
        left_s = min(sample.time_left_s or 0.0, self._ends_at - self._now)
        is_tail = sample.unsent <= sample.window  # a restart would only delay it
        return self._is_calm and not is_tail and gain * left_s > GAIN_TO_COST * cost_s

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
        """Return a server's gain relative to the other servers; 0 if it is unclear."""
        now = {each: watch.rates for each, watch in self._servers.items() if all(watch.rates)}
        ratios = {
            each: [new / old for new, old in zip(now[each], before[each], strict=True)]
            for each in now.keys() & before.keys()
        }
        if server not in ratios:
            return 0.0
        return gain_over_others(ratios.pop(server), [*ratios.values()])
