"""Flag tuning during a run: its servers change flags step by step, by the rules of `batchrun advise`.

After at least 30 s of steady work (a window), the advice for a server names a step: flags to change. The
first step changes all flags that the advice names, since a restart costs the same for one flag and for
several. A step is tried if its gain over the remaining time is more than three times the cost of the restart.

One server restarts with the step. Its output tokens/s are compared with its earlier rate, and with the change
of the other servers' rates. The lengths of rows may change in between, so the rate that includes prompt
tokens has to agree. If the step gains, it is kept, and the other servers follow one by one. If it loses, it
is undone if that is worth another restart. Later each of its rules is tried alone. All results are remembered
for later jobs.

This module reads no clock, because each load sample comes with its time.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

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
"""A restart pays off if it saves at least this many times the time that it costs, until the end of the run.
"""
MOST_WINDOWS = 4
"""Maximum length of a trial of new flags, in measuring windows. A window is TIMING.adapt seconds plus the
mean time in flight of a row. The trial then ends even if it had too little steady work."""


def adaptation_of(engine: Engine, run_dir: RunDir, ends_at: float) -> "Adaptation | None":
    """Return the flag tuning of an engine's servers; None if the run does not change their flags."""
    if not isinstance(engine, LaunchedFleet) or engine.memory is None:
        return None
    servers = {
        server: ServerWatch(run_dir, server.url, server.log_path, server.log_offset)
        for server in engine.servers
    }
    return Adaptation(servers, engine.memory, ends_at)


class Adaptation:
    """Tunes the flags of a run's servers. Each load sample of the run resumes the generator `_tune`."""

    def __init__(
        self, servers: Mapping[SGLangServer, ServerWatch], memory: FlagMemory, ends_at: float
    ) -> None:
        """Tune the flags of `servers`, each given with the watch that measures its speed.

        Gains are stored in `memory` for later runs. `ends_at` is the deadline of the run on the monotonic
        clock; it is infinite without a deadline.
        """
        self._servers = servers
        self._memory = memory
        self._ends_at = ends_at
        self._sample: RunSample
        """The newest load sample."""
        self._now: float
        """Time of the newest load sample, in seconds of the monotonic clock."""
        self._is_stopped = False
        """Whether the run is stopping, so that no more flags are changed."""
        self._work = self._tune()
        """The generator that tunes; it waits for the next load sample at each `yield`."""

    async def take(self, sample: RunSample, now: float) -> None:
        """Process a load sample, read at `now` on the monotonic clock.

        The server logs and result files are read in a thread. Await this call before the call with the next
        sample.
        """
        self._sample, self._now = sample, now
        for watch in self._servers.values():
            await asyncio.to_thread(watch.take, sample, now)
        # Run `_tune` until it waits for the next load sample.
        if not self._is_stopped:
            next(self._work)

    def stop(self) -> None:
        """Restart no more servers, and let no row wait for a restart, because the run is stopping.

        It is called again with each poll, for rows that begin to wait later.
        """
        self._is_stopped = True
        for server in self._servers:
            server.cancel_restart()

    def _tune(self) -> Iterator[None]:
        """Try one step after another for ever. Each `yield` waits for the next load sample."""
        while True:
            yield from self._measure_window()
            for server, watch in self._servers.items():
                # A server that has worked for a whole window keeps its flags even if it dies later.
                server.end_trial()
                step = None if server.lost else self._next_step(server, watch)
                if step is not None:
                    yield from self._try(server, step)
                    # The rates have changed, so they are measured again before the next step.
                    break

    @property
    def _is_calm(self) -> bool:
        """Whether no server is starting."""
        return all(server.up or server.lost for server in self._servers)

    def _measure_window(self, most_s: float = math.inf) -> Iterator[None]:
        """Wait until all servers are up, then until each has had TIMING.adapt seconds of steady work.

        `most_s` is the maximum wait, in seconds, after all servers are up for the first time.
        """
        ends_at = math.inf
        while True:
            while not self._is_calm:
                yield
            ends_at = min(ends_at, self._now + most_s)
            for watch in self._servers.values():
                watch.begin()
            # If a server restarts, the measurement begins anew.
            while self._is_calm:
                yield
                if self._has_full_window or self._now > ends_at:
                    return

    @property
    def _has_full_window(self) -> bool:
        """Whether each server that is not lost has had TIMING.adapt seconds of steady work in this window."""
        busy_s = [watch.busy_s for server, watch in self._servers.items() if not server.lost]
        return min(busy_s, default=0.0) >= TIMING.adapt

    @property
    def _life_s(self) -> float:
        """Mean time in flight of a row, in seconds: rows in flight / rows per second (Little's law)."""
        return self._sample.in_flight / max(self._sample.rows_per_s, 1e-9)

    def _next_step(self, server: SGLangServer, watch: ServerWatch) -> Step | None:
        """Return the first change of flags that is worth a restart; None if none is.

        The first one follows all rules that give advice. The others follow one rule each.
        """
        steps = steps_for(watch.situation, self._memory.gains, server.may_change)
        return next((step for step, gain in steps if self._pays(server, gain)), None)

    def _pays(self, server: SGLangServer, gain: float) -> bool:
        """Tell whether a gain (a fraction of the present speed) is worth a restart of a server now."""
        sample = self._sample
        # A restart waits for the rows in flight, but at most as long as a start takes. Then it starts the
        # server.
        cost_s = server.start_s + min(server.start_s, self._life_s)
        remaining_s = min(sample.time_left_s or 0.0, self._ends_at - self._now)
        is_tail = sample.unsent <= sample.window  # near the end, a restart only delays the last rows
        return self._is_calm and not is_tail and gain * remaining_s > GAIN_TO_COST * cost_s

    def _try(self, server: SGLangServer, step: Step) -> Iterator[None]:
        """Try new flags with one server. Then restart the other servers with them too, or undo them."""
        old_args = server.adapted
        new_args = {**old_args, **step.args}
        rates_before = self._rates()
        server.adapt(new_args, step.why)
        yield from self._measure_window(MOST_WINDOWS * (TIMING.adapt + self._life_s))
        # From now on, the server keeps its flags even if it dies.
        server.end_trial()
        # If the server has other flags now, it failed to start with the new ones. That counts as a loss of
        # all speed.
        has_new_args = server.adapted == new_args
        gain = self._gain(server, rates_before) if has_new_args else -1.0
        is_good = gain >= LEAST_GAIN
        if gain:  # 0 means that the gain is unclear
            self._memory.learn(step.name, gain, step.args if is_good else {})
        restarts: dict[SGLangServer, dict[str, Any]] = {}
        if not has_new_args:
            outcome = "dropped"
        elif is_good:
            outcome = "kept"
            others = [other for other in self._servers if other is not server]
            restarts = {other: {**other.adapted, **step.args} for other in others}
        elif self._pays(server, -gain):
            outcome = "undone"
            restarts = {server: old_args}
        else:
            outcome = "kept, because undoing it costs another start"
        speed = f"{1 + gain:.2f} x the output tokens a second" if gain else "the gain is unclear"
        why = f"{command_line(step.args)}: {speed}: {outcome}"
        log.warning("%s: %s", server.name, why)
        server.incidents.append(Incident("adapted", server.name, why, {"new": step.args, "gain": gain}))
        # Restart one server at a time. Each restart must still pay off in the remaining time: by the gain of
        # the new flags, or by the loss that it undoes.
        for restarted, args in restarts.items():
            if self._pays(restarted, abs(gain)):
                restarted.adapt(args, f"{server.name} showed {1 + gain:.2f} x")
                while not self._is_calm:
                    yield
                restarted.end_trial()

    def _rates(self) -> dict[SGLangServer, tuple[float, ...]]:
        """Return the measured rates of each server, without servers that had no work to measure."""
        return {server: watch.rates for server, watch in self._servers.items() if all(watch.rates)}

    def _gain(self, server: SGLangServer, rates_before: Mapping[SGLangServer, tuple[float, ...]]) -> float:
        """Return a server's gain in speed, relative to the other servers; 0 if it is unclear."""
        rates = self._rates()
        ratios: dict[SGLangServer, list[float]] = {}
        for each in rates.keys() & rates_before.keys():
            pairs = zip(rates[each], rates_before[each], strict=True)
            ratios[each] = [rate / rate_before for rate, rate_before in pairs]
        if server not in ratios:
            return 0.0
        return gain_over_others(ratios.pop(server), [*ratios.values()])
