"""What becomes of the arguments of an engine's servers when one of them dies, and what the next run gets."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from batchrunner.core.types import Incident
from batchrunner.engines.device import cards
from batchrunner.engines.flags import name_in, of_arguments, version_of
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.thresholds import Thresholds
from batchrunner.engines.model_files import model_identity
from batchrunner.engines.recovery.diagnosis import NAMES, examine
from batchrunner.engines.recovery.fits import split_over
from batchrunner.engines.recovery.host import memory_bytes
from batchrunner.engines.recovery.remembered import Lesson, Remembered
from batchrunner.engines.recovery.safer_args import MORE_CONSERVATIVE, in_effect, safer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchrunner.engines.flags import Flags
    from batchrunner.engines.logs.facts import Facts
    from batchrunner.engines.logs.series import Series
    from batchrunner.engines.recovery.diagnosis import Death, Life
    from batchrunner.job.spec import LaunchedEngine

log = logging.getLogger(__name__)

MOST_CHANGES = 6
"""In one run: every one costs a start. It is three steps of the pool's share, two of the chunk, and one."""
LEAST_SPAN_S = 300.0
"""Less work tells no rate of retractions."""
_HOPELESS = {
    "killed": "the machine, or our cgroup on it, has too little memory",
    "load": "take more cards (tp-size), quantise (quantization: fp8), or take a larger card",
}


class Healer:
    """The servers of one engine share it: what one of them dies of, the others need not die of too."""

    def __init__(
        self, given: Mapping[str, Any], memory: Remembered, tell: Callable[[Incident], None]
    ) -> None:
        """`given` are the job's `engine.args`, `memory` knows earlier runs, `tell` takes note."""
        self.args: dict[str, Any] = {}
        """What the next start has over the job's own arguments."""
        self._given = given
        self._memory = memory
        self._tell = tell
        self._tried: list[dict[str, Any]] = []
        self._why = ""
        self._learned = False  # something that the file does not know

    def recall(self) -> None:
        """Begin with what worked in an earlier run, where the job does not say otherwise; says so."""
        lesson = self._memory.recall()
        learned = lesson.args if lesson else {}
        self.args = {n: v for n, v in learned.items() if name_in(self._given, n) not in self._given}
        if lesson and self.args:
            self._why = lesson.why
            why = f"learned on {lesson.on} from {lesson.why}"
            log.info(
                "starting with %s, %s; engine.args overrules it; delete %s to forget",
                _shown(self.args), why, self._memory.path,
            )  # fmt: skip
            self._tell(Incident("recalled", "the engine", why, {"new": dict(self.args)}))

    def heal(self, who: str, life: Life) -> bool:
        """Take note of a death; tell whether the next start is another one, so that no row is to blame."""
        told = _read(life)
        death = examine(life, told.facts)
        if not death.of_memory:
            return False
        if not self._had_all(life):  # another server died before: what was learned has yet to reach this one
            return True
        args = self._safer(death, told)
        if not args:
            hint = _HOPELESS.get(death.kind, "no safer arguments are left")
            log.warning("%s: %s: %s", who, NAMES[death.kind], hint)
            return False
        self._tried.append(self.args)
        old = {name: in_effect(told.facts, name) for name in args}
        self._learn(args, NAMES[death.kind])
        said = f"{self._why}: {_shown(args, old)} at the next start{self._overruled(args)}"
        log.warning("%s: %s (change %d of at most %d)", who, said, len(self._tried), MOST_CHANGES)
        self._tell(Incident("healed", who, death.why, {"kind": death.kind, "old": old, "new": args}))
        return True

    def outlived(self, life: Life) -> None:
        """Take note of a server that was well to the end of the run: what it had goes to the next one."""
        if not self._had_all(life):
            return
        told = _read(life)
        args = self._calmer(told)
        if args:
            self._learn(args, f"{told.series.retractions_per_min:.1f} retractions a minute")
            log.info("%s: the next run has %s (%s)", self._why, _shown(args), self._memory.path)
        if self._learned:
            self._learned = False
            self._memory.keep(Lesson(self.args, self._why, f"{datetime.now(UTC):%Y-%m-%d}"))

    def _had_all(self, life: Life) -> bool:
        return all(life.args.get(name) == value for name, value in self.args.items())

    def _learn(self, args: Mapping[str, Any], why: str) -> None:
        self.args = {**self.args, **args}
        self._why, self._learned = why, True

    def _safer(self, death: Death, told: _Reading) -> dict[str, Any]:
        """Return what to change, for frequent retractions too; what was tried before did not help."""
        args = safer(death, told.facts, told.flags)
        if not args or len(self._tried) >= MOST_CHANGES or {**self.args, **args} in self._tried:
            return {}
        return {**self._calmer(told), **args}

    def _calmer(self, told: _Reading) -> dict[str, Any]:
        """Return what frequent retractions call for, unless the job says how conservative it wants to be.

        They are no reason for a restart: that costs the load time and the whole cache, more than they do.
        """
        series, name = told.series, "schedule-conservativeness"
        calm = (in_effect(told.facts, name) or 1.0) >= MORE_CONSERVATIVE or name in self._given
        costs = series.retractions_cost and series.busy_s >= LEAST_SPAN_S
        return {name: MORE_CONSERVATIVE} if costs and not calm else {}

    def _overruled(self, args: Mapping[str, Any]) -> str:
        """Say where the job's own value is changed."""
        own = [f"{name}: {self._given[name]}" for name in args if name in self._given]
        return f" (engine.args has {', '.join(own)}: changed, as nothing else would run)" if own else ""


def healer_for(
    spec: LaunchedEngine, model: str, tell: Callable[[Incident], None], *, tp: int | None = None, cpu: bool
) -> Healer | None:
    """Return the healer of a job's servers, with what earlier runs learned; None where it wants none."""
    if not spec.heal:
        return None
    ways = split_over(spec.args, tp)
    found = [] if cpu else cards()
    room = found[0].memory_bytes if found else memory_bytes() or 0
    card = f"{ways} x {'CPU' if cpu else found[0].name if found else 'GPU'}, {room >> 30} GiB"
    memory = Remembered(model_identity(model), card, version_of(spec.python, spec.env))
    healer = Healer(spec.args, memory, tell)
    healer.recall()
    return healer


class _Reading(NamedTuple):
    """What the beginning and the end of a log tell."""

    facts: Facts
    series: Series
    flags: Flags


def _read(life: Life) -> _Reading:
    """Read a life's log; what it does not tell is as the server was started."""
    reader = LogReader(Thresholds())
    for line in life.lines:
        reader.take(line)
    told = reader.facts.arguments
    asked = {name.replace("-", "_"): value for name, value in life.args.items()}
    reader.facts.arguments = {**asked, **{name: value for name, value in told.items() if value is not None}}
    return _Reading(reader.facts, reader.series, of_arguments(None, told))


def _shown(args: Mapping[str, Any], old: Mapping[str, float | None] = {}) -> str:
    """Write arguments as `chunked-prefill-size 8192 -> 4096`, or the new value alone."""
    before = {name: f"{value} -> " for name, value in old.items() if value is not None}
    return ", ".join(f"{name} {before.get(name, '')}{value}" for name, value in args.items())
