"""The healer: a death for want of memory → safer arguments for the next start, kept for the next run."""

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import BatchrunError
from batchrunner.core.files import cache_directory
from batchrunner.engines.base import IncidentQueue
from batchrunner.engines.device import cards, memory_bytes
from batchrunner.engines.flags import Flags, name_in, of_arguments, version_of
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.series import Thresholds
from batchrunner.engines.model_files import model_identity
from batchrunner.engines.model_memory import split_over
from batchrunner.engines.recovery.diagnosis import NAMES, Death, EndedServer, examine
from batchrunner.engines.recovery.safer_args import (
    CONSERVATIVENESS,
    LESS_CONSERVATIVE,
    MORE_CONSERVATIVE,
    NORMAL,
    in_effect,
    safer,
)
from batchrunner.job.engine import LaunchedEngine
from batchrunner.output.files import write_json

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LearnedArgs:
    """Arguments with which a server ran, after it had died with others."""

    args: dict[str, Any]
    """Arguments as `engine.args` has them."""
    why: str
    """Why the server died before."""
    on: str
    """Day on which they were learned, YYYY-MM-DD."""


class LearnedArgsFile:
    """The file of what was learned for one model, card and version of SGLang."""

    def __init__(self, model: str, card: str, version: str | None) -> None:
        self._about = {"format": FORMAT, "model": model, "card": card, "sglang": version or "unknown"}
        digest = hashlib.sha256(orjson.dumps(self._about, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])[:60]
        self.path = cache_directory() / "engines" / f"{name}-{digest}.json"

    def read(self) -> LearnedArgs | None:
        """Return what was learned; None without a file, and with a warning where it cannot be read."""
        try:
            stored = orjson.loads(self.path.read_bytes())
            return LearnedArgs(dict(stored["args"]), str(stored["why"]), str(stored["on"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as failure:
            log.warning("%s: not read (%s): delete it", self.path, failure)
            return None

    def write(self, learned: LearnedArgs) -> None:
        """Write down what was learned for the next run; log a warning where that fails."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {**self._about, **asdict(learned)})
        except (OSError, BatchrunError) as failure:
            log.warning("what worked is not remembered for the next run: %s", failure)


MOST_CHANGES = 6
"""Most changes in one run; each costs a start. It is three of the pool's share, two of the chunk, and one."""
LEAST_SPAN_S = 300.0
"""Seconds of work that it takes to judge how often requests are retracted."""
_DP_ATTENTION = ("enable-dp-attention", "attn-dp-size")
"""Arguments with which SGLang itself multiplies the conservativeness by 0.3."""
_HOPELESS = {
    "killed": "the machine, or our cgroup on it, has too little memory",
    "load": "take more cards (tp-size), quantise (quantization: fp8), or take a larger card",
}


class Healer:
    """Chooses the arguments of the next start after a death, and those of the next run.

    The servers of one engine share a healer: what one of them dies of, the others need not die of too.
    """

    def __init__(self, given: Mapping[str, Any], file: LearnedArgsFile, incidents: IncidentQueue) -> None:
        """Take the job's `engine.args` and what earlier runs learned."""
        self.args: dict[str, Any] = {}
        """Safer arguments, which replace the job's own, or add to them."""
        self._given = given
        self._file = file
        self._incidents = incidents
        self._tried: list[dict[str, Any]] = []
        self._pace: dict[str, Any] = {}  # the conservativeness of the next start and run, by this run
        self._why = ""
        self._learned = False  # whether `args` has changes that are not written down yet

    @property
    def next_args(self) -> Mapping[str, Any]:
        """Arguments of the next start that replace the job's own, or add to them."""
        return {**self.args, **self._pace}

    def recall(self) -> None:
        """Begin with what worked in an earlier run, where the job does not say otherwise; log what it is."""
        learned = self._file.read()
        if learned is None:
            return
        self.args = {n: v for n, v in learned.args.items() if name_in(self._given, n) not in self._given}
        if self.args:
            self._why = learned.why
            why = f"learned on {learned.on} from {learned.why}"
            log.info(
                "starting with %s, %s; engine.args overrules it; delete %s to forget",
                _shown(self.args), why, self._file.path,
            )  # fmt: skip
            self._incidents.report(Incident("recalled", "the engine", why, {"new": dict(self.args)}))

    def heal(self, name: str, ended: EndedServer) -> bool:
        """Change `args` after a server's death; return whether they help, so that no row is at fault."""
        log_reader, flags = _read(ended)
        facts = log_reader.facts
        death = examine(ended, facts)
        if not death.of_memory:
            return False
        if not self._had_all(ended):  # another server died before: this one did not have the changes yet
            return True
        args = self._safer(death, log_reader, flags)
        if not args:
            hint = _HOPELESS.get(death.kind, "no safer arguments are left")
            log.warning("%s: %s: %s", name, NAMES[death.kind], hint)
            return False
        self._tried.append(self.args)
        old = {name: in_effect(facts, name) for name in args}
        self._learn(args, NAMES[death.kind])
        log.warning(
            "%s: %s: %s at the next start (change %d of at most %d)",
            name, self._why, _shown(args, old), len(self._tried), MOST_CHANGES,
        )  # fmt: skip
        self._incidents.report(
            Incident("healed", name, death.why, {"kind": death.kind, "old": old, "new": args})
        )
        return True

    def admit_more(self) -> float | None:
        """Let the next start, and the next run, hold fewer requests back; return their conservativeness.

        None if the job sets it, if one was learned before, or if SGLang has lowered it already.
        """
        known = {**self._given, **self.args, **self._pace}
        if any(name_in(known, name) in known for name in (CONSERVATIVENESS, *_DP_ATTENTION)):
            return None
        self._pace = {CONSERVATIVENESS: LESS_CONSERVATIVE}
        return LESS_CONSERVATIVE

    def outlived(self, server: EndedServer) -> None:
        """Write down the arguments of a server that still runs when the run ends, for the next run."""
        if not self._had_all(server):
            return
        log_reader, _ = _read(server)
        args = self._calmer(log_reader)
        why = f"{log_reader.series.retractions_per_min:.1f} retractions a minute"
        if self._pace and not args:
            args, why = self._pace, "requests that waited though the KV pool had room"
        if args:
            self._learn(args, why)
            log.info("%s: the next run has %s (%s)", self._why, _shown(args), self._file.path)
        if self._learned:
            self._learned = False
            self._file.write(LearnedArgs(self.args, self._why, f"{datetime.now(UTC):%Y-%m-%d}"))

    def _had_all(self, server: EndedServer) -> bool:
        return all(server.args.get(name) == value for name, value in self.args.items())

    def _learn(self, args: Mapping[str, Any], why: str) -> None:
        self.args = {**self.args, **args}
        self._why, self._learned = why, True

    def _safer(self, death: Death, log_reader: LogReader, flags: Flags) -> dict[str, Any]:
        """Return what to change, for frequent retractions too; empty if it was tried before."""
        args = safer(death, log_reader.facts, flags)
        if not args or len(self._tried) >= MOST_CHANGES or {**self.args, **args} in self._tried:
            return {}
        return {**self._calmer(log_reader), **args}

    def _calmer(self, log_reader: LogReader) -> dict[str, Any]:
        """Return a higher `schedule-conservativeness` if retractions are frequent and the job sets none.

        A low one that was learned is taken back at once. Retractions alone cause no restart: that costs the
        load time and the whole cache, more than they do.
        """
        series, name = log_reader.series, CONSERVATIVENESS
        value = in_effect(log_reader.facts, name) or NORMAL
        if not series.retractions_cost or name in self._given:
            return {}
        if value < NORMAL and self.next_args.get(name) == LESS_CONSERVATIVE:
            return {name: NORMAL}
        calm = value >= MORE_CONSERVATIVE or series.busy_s < LEAST_SPAN_S
        return {} if calm else {name: MORE_CONSERVATIVE}


def healer_for(spec: LaunchedEngine, model: str, incidents: IncidentQueue, *, cpu: bool) -> Healer | None:
    """Return the healer of a job's servers, with what earlier runs learned; None if the job wants none."""
    if not spec.heal:
        return None
    found = [] if cpu else cards()
    room = found[0].memory_bytes if found else memory_bytes() or 0
    card = (
        f"{split_over(spec.args)} x {'CPU' if cpu else found[0].name if found else 'GPU'}, {room >> 30} GiB"
    )
    file = LearnedArgsFile(model_identity(model), card, version_of(spec.python, spec.env))
    healer = Healer(spec.args, file, incidents)
    healer.recall()
    return healer


def _read(server: EndedServer) -> tuple[LogReader, Flags]:
    """Read a server's log, whose missing arguments are as the server was started; return its flags too."""
    reader = LogReader(Thresholds())
    for line in server.lines:
        reader.take(line)
    logged = reader.facts.arguments
    asked = {name.replace("-", "_"): value for name, value in server.args.items()}
    in_log = {name: value for name, value in logged.items() if value is not None}
    reader.facts.arguments = {**asked, **in_log}
    return reader, of_arguments(None, logged)


def _shown(args: Mapping[str, Any], old: Mapping[str, float | None] = {}) -> str:
    """Write arguments as `chunked-prefill-size 8192 -> 4096`, or the new value alone."""
    before = {name: f"{value} -> " for name, value in old.items() if value is not None}
    return ", ".join(f"{name} {before.get(name, '')}{value}" for name, value in args.items())
