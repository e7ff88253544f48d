"""What was learned about a model on a machine, kept for the next run."""

import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import BatchrunError
from batchrunner.core.files import cache_directory
from batchrunner.job.engine import ServerEngine
from batchrunner.output.files import make_directory, write_json
from batchrunner.sglang.device import cards
from batchrunner.sglang.flags import command_line, version_of
from batchrunner.sglang.model_files import model_identity, split_over

log = logging.getLogger(__name__)


class Learned(msgspec.Struct):
    """What earlier runs found out of a model on a card: the content of a file."""

    args: dict[str, Any] = {}
    """Arguments, and variables, to begin with."""
    gains: dict[str, float] = {}
    why: str = ""
    """Since when these arguments are needed, and for what."""


_read_learned = msgspec.json.Decoder(Learned)


def recall(file: Path) -> Learned:
    """Return what was written down; nothing where the file is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return _read_learned.decode(file.read_bytes())
    return Learned()


class FlagMemory:
    """The flags and variables that were found best for a shape of job, and what each step gained.

    Other tasks of the run have the same file, and learn from each other by it.
    """

    def __init__(self, file: Path, incidents: list[Incident]) -> None:
        self._file = file
        self._gains: dict[str, float] = {}  # of this task's steps, also where the file cannot be written
        self.args = recall(file).args
        """Those with which the servers of this run start, beside the job's own."""
        if self.args:
            why = "found best by an earlier run of such a job"
            log.info("starting with %s, %s; delete %s to forget", command_line(self.args), why, file)
            incidents.append(Incident("recalled", "the engine", why, {"new": self.args}))

    @property
    def gains(self) -> dict[str, float]:
        """Gain of each step that was tried: 0.1 is a tenth more output tokens a second."""
        return recall(self._file).gains | self._gains

    def learn(self, step: str, gain: float, args: Mapping[str, Any] = {}) -> None:
        """Write down what a step gained, and what it sets, where later runs are to start with that."""
        self._gains[step] = round(gain, 3)
        remember(self._file, Learned({**recall(self._file).args, **args}, self.gains))

    def forget(self) -> None:
        """Start no more with what was found, and try none of its steps: a server lives only without them."""
        self._gains |= {step: -1.0 for step, gain in self.gains.items() if gain > 0}
        remember(self._file, Learned(gains=self.gains))


def learned_file(spec: ServerEngine, model: str, *, cpu: bool) -> Path:
    """Return the file for what holds for one model, card and version of SGLang."""
    card = "CPU" if cpu else str(next(iter(cards()), None))
    about = (model_identity(model), split_over(spec.args), card, version_of(spec.python, spec.env))
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])
    return cache_directory() / "engines" / f"{name}-{digest}.json"


def remember(file: Path, learned: Learned) -> None:
    """Write down what a run learned, for the next one; other runs may write the file too."""
    try:
        make_directory(file.parent)
        write_json(file, msgspec.to_builtins(learned), writer=secrets.token_hex(4))
    except (OSError, BatchrunError) as failure:
        log.warning("what worked is not remembered for the next run: %s", failure)
