"""Remembers flags that worked for a model on a machine, in files of JSON Lines.

Safer flags after a server's death, and the gains of changed flags, are stored in the cache directory of this
machine, in one file for each model, GPU and version of SGLang. Trials of `batchrun tune` belong to one job,
so they are stored in its run directory.
"""

import contextlib
import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import BatchrunError
from batchrunner.core.files import cache_directory
from batchrunner.job.engine import ServerEngine
from batchrunner.output.files import make_directory, writing
from batchrunner.sglang.device import cards
from batchrunner.sglang.flags import command_line, version_of
from batchrunner.sglang.model_files import model_identity, split_over

log = logging.getLogger(__name__)


class Memo(msgspec.Struct):
    """One line of a memory file: something that was learned about flags."""

    kind: Literal["safer", "step", "trial"]
    """Kind of the content: safer flags after a death, a step of tuning during a run, or a tuning trial."""
    about: str
    """Digest or name of what the content applies to, such as a job; empty if the whole file is about one
    thing."""
    content: msgspec.Raw


_read_memo = msgspec.json.Decoder(Memo)


class Memory:
    """A file with one memo per line. Several processes may append to it. Damaged lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def recall(self, kind: str, about: str = "") -> list[msgspec.Raw]:
        """Return the contents of the lines with this kind and subject, the oldest first.

        Empty if the file cannot be read.
        """
        lines: list[bytes] = []
        with contextlib.suppress(OSError):
            lines = self.path.read_bytes().splitlines()
        contents = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                memo = _read_memo.decode(line)
                if (memo.kind, memo.about) == (kind, about):
                    contents.append(memo.content)
        return contents

    def append(self, kind: Literal["safer", "step", "trial"], content: Any, about: str = "") -> None:
        """Append a line to the file; raises StorageError."""
        # Flag values without a JSON type, such as paths, are written as text.
        raw_content = msgspec.Raw(msgspec.json.encode(content, enc_hook=str))
        memo = Memo(kind=kind, about=about, content=raw_content)
        with writing(self.path):
            make_directory(self.path.parent)
            with self.path.open("ab") as file:
                # The newline comes first, because a kill may have left the last line incomplete.
                file.write(b"\n" + msgspec.json.encode(memo))

    def try_to_append(self, kind: Literal["safer", "step"], content: Any, about: str = "") -> None:
        """Append a line. A failure is only logged, because the run can go on without it."""
        try:
            self.append(kind, content, about)
        except (OSError, BatchrunError) as failure:
            log.warning("the flags that worked could not be saved for the next run: %s", failure)


def memory_of(spec: ServerEngine, model: str, *, cpu: bool) -> Memory:
    """Return the memory file for a model, its split over GPUs, the type of GPU and the version of SGLang."""
    card = "CPU" if cpu else str(next(iter(cards()), None))
    subject = (model_identity(model), split_over(spec.args), card, version_of(spec.python, spec.env))
    digest = hashlib.sha256(repr(subject).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])
    return Memory(cache_directory() / "engines" / f"{name}-{digest}.jsonl")


class SaferFlags(msgspec.Struct):
    """Arguments with which a server kept running after earlier servers had died."""

    args: dict[str, Any]
    why: str
    """Clause that follows `starting with …` in the log: the day and the cause of the last death."""


_read_safer_flags = msgspec.json.Decoder(SaferFlags)


def recall_safer_flags(memory: Memory) -> SaferFlags | None:
    """Return the newest arguments with which a server kept running; None if there are none."""
    for content in reversed(memory.recall("safer")):
        with contextlib.suppress(msgspec.MsgspecError):
            return _read_safer_flags.decode(content)
    return None


class TriedStep(msgspec.Struct):
    """A change of flags that was tried during a run."""

    name: str
    """Name of the change, see `adapt.Step`."""
    gain: float
    """Relative gain in output tokens per second: 0.1 is a tenth more. -1 if a server cannot run with the
    change."""
    args: dict[str, Any] = {}
    """Flags and variables with which later runs start; empty if the change gained nothing."""


_read_step = msgspec.json.Decoder(TriedStep)


class FlagMemory:
    """The best known flags and variables for similar jobs, and the gain of each change that was tried.

    Jobs are similar if their prompt, sampling and engine are the same. The workers of a shared run use the
    same file, so they learn from each other.
    """

    def __init__(self, memory: Memory, shape: str, incidents: list[Incident]) -> None:
        """Read what earlier runs have learned for this `shape`, a digest of prompt, sampling and engine."""
        self._memory = memory
        self._shape = shape
        # Changes tried by this worker, in case the file cannot be written.
        self._steps: list[TriedStep] = []
        self.args = {name: value for step in self._latest() for name, value in step.args.items()}
        """Flags and variables with which the servers of this run start, in addition to the job's own."""
        if self.args:
            why = "the best flags of an earlier run of such a job"
            log.info("starting with %s, %s; delete %s to forget", command_line(self.args), why, memory.path)
            incidents.append(Incident("recalled", "the engine", why, {"new": self.args}))

    @property
    def gains(self) -> dict[str, float]:
        """Gain of each change that was tried, by its name: 0.1 is a tenth more output tokens per second."""
        return {step.name: step.gain for step in self._latest()}

    def learn(self, step: str, gain: float, args: Mapping[str, Any] = {}) -> None:
        """Record the gain of a change. Later runs start with the flags `args`; pass none for a loss."""
        self._record(TriedStep(step, round(gain, 3), dict(args)))

    def forget(self) -> None:
        """Drop all learned flags for good, because a server could only be started without them."""
        for step in self._latest():
            if step.gain > 0:
                self._record(TriedStep(step.name, gain=-1.0))

    def _record(self, step: TriedStep) -> None:
        self._steps.append(step)
        self._memory.try_to_append("step", step, about=self._shape)

    def _latest(self) -> list[TriedStep]:
        """Return the last trial of each change, in the order of the trials."""
        steps = []
        for content in self._memory.recall("step", about=self._shape):
            with contextlib.suppress(msgspec.MsgspecError):
                steps.append(_read_step.decode(content))
        latest: dict[str, TriedStep] = {}
        for step in [*steps, *self._steps]:
            latest.pop(step.name, None)
            latest[step.name] = step
        return [*latest.values()]
