"""What becomes of the arguments of an engine's servers when one of them dies, and what the next run gets."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchrunner.care.death import NAMES, examine
from batchrunner.care.effective import arguments_told, effective
from batchrunner.care.fits import split_over
from batchrunner.care.flags import of_arguments, version_of
from batchrunner.care.host import memory_bytes
from batchrunner.care.remembered import Lesson, Remembered
from batchrunner.care.safer import calmer, safer
from batchrunner.engines.device import cards
from batchrunner.engines.model import model_identity
from batchrunner.records import Incident

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchrunner.care.death import Death, Life
    from batchrunner.care.safer import Change
    from batchrunner.job import LaunchedEngine

log = logging.getLogger(__name__)

MOST_CHANGES = 6
"""In one run: every one costs a start. It is three steps of the pool's share, two of the chunk, and one."""
_HOPELESS = {
    "killed_by_kernel": "the machine, or our cgroup on it, has too little memory",
    "oom_load": "take more cards (tp-size), quantise (quantization: fp8), or take a larger card",
}


class Healer:
    """The servers of one engine share it: what one of them dies of, the others need not die of too."""

    def __init__(
        self,
        given: Mapping[str, Any],
        memory: Remembered,
        tell: Callable[[Incident], None],
        *,
        cpu: bool,
    ) -> None:
        """`given` are the job's `engine.args`, `memory` knows earlier runs, `tell` takes note."""
        self.args: dict[str, Any] = {}
        """What the next start has over the job's own arguments."""
        self._given = given
        self._memory = memory
        self._tell = tell
        self._cpu = cpu
        self._tried: list[dict[str, Any]] = []
        self._why = ""
        self._learned = False  # something that the file does not know

    def recall(self) -> None:
        """Begin with what worked in an earlier run, where the job does not say otherwise; says so."""
        lesson = self._memory.recall()
        self.args = {n: v for n, v in lesson.args.items() if n not in self._given} if lesson else {}
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
        death = examine(life)
        if not death.of_memory:
            return False
        if not self._had_all(life):  # another server died before: what was learned has yet to reach this one
            return True
        change = self._change(death, life)
        if change is None:
            hint = _HOPELESS.get(death.kind, "no safer arguments are left")
            log.warning("%s: %s: %s", who, NAMES[death.kind], hint)
            return False
        self._tried.append(self.args)
        self.args = {**self.args, **change.args}
        self._why, self._learned = change.why, True
        said = f"{change.why}: {change} at the next start{self._overruled(change)}"
        log.warning("%s: %s (change %d of at most %d)", who, said, len(self._tried), MOST_CHANGES)
        facts = {"kind": death.kind, "old": dict(change.before), "new": dict(change.args)}
        self._tell(Incident("healed", who, death.why or said, facts))
        return True

    def outlived(self, life: Life) -> None:
        """Take note of a server that was well to the end of the run: what it had goes to the next one."""
        if not self._had_all(life):
            return
        change = self._calmer(life)
        if change is not None:
            self.args = {**self.args, **change.args}
            self._why, self._learned = change.why, True
            log.info("%s: the next run has %s (%s)", change.why, change, self._memory.path)
        if self._learned:
            self._learned = False
            self._memory.keep(Lesson(dict(self.args), self._why, f"{datetime.now(UTC):%Y-%m-%d}"))

    def _had_all(self, life: Life) -> bool:
        return all(life.args.get(name) == value for name, value in self.args.items())

    def _change(self, death: Death, life: Life) -> Change | None:
        """Return what to change, for frequent retractions too; what was tried before did not help."""
        now = effective(life.lines, life.args, cpu=self._cpu)
        change = safer(death, now, of_arguments(None, arguments_told(life.lines)).spelling)
        if change is None or len(self._tried) >= MOST_CHANGES:
            return None
        if {**self.args, **change.args} in self._tried:
            return None
        calm = self._calmer(life)
        return change.along_with(calm) if calm else change

    def _calmer(self, life: Life) -> Change | None:
        """Return what frequent retractions call for, unless the job says how conservative it wants to be."""
        change = calmer(effective(life.lines, life.args, cpu=self._cpu))
        return None if change is None or change.args.keys() & self._given.keys() else change

    def _overruled(self, change: Change) -> str:
        """Say where the job's own value is changed."""
        own = [f"{name}: {self._given[name]}" for name in change.args if name in self._given]
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
    healer = Healer(spec.args, memory, tell, cpu=cpu)
    healer.recall()
    return healer


def _shown(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in args.items())
