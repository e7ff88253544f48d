"""Recovery: why a server died → arguments with which it lives, for its next start and for the next run.

`examine` diagnoses a death from the server's log, its exit status and the kernel's count of kills. `safer`
names arguments that need less memory, by SGLang's tuning guides. In prefill: smaller chunks. In decode: fewer
running requests. At graph capture: smaller graphs. Anywhere, and when such a step has no smaller value left:
a smaller fraction of the card for the KV pool. Where the place is not known and that does not help: smaller
chunks, then fewer running requests. On a CPU the server's memory grows with the pool, whose size is a number
of tokens. Advice proposes these arguments, and a launched engine that died gets them from its `Healer`, which
remembers them.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batchrunner.core.engine_info import Incident
from batchrunner.sglang.flags import Flags, name_in, of_arguments
from batchrunner.sglang.logs.lines import Phase, clean
from batchrunner.sglang.logs.reader import Facts, LogReader
from batchrunner.tuning.flags import FLAGS, Server, in_effect, next_setting
from batchrunner.tuning.memory import Memory, SaferFlags, recall_safer_flags

log = logging.getLogger(__name__)

TAIL_BYTES = 4 << 20
"""Bytes read of a log's end: after one rank's error the others may write thousands of tracebacks."""
HEAD_BYTES = 1 << 20
"""Bytes read of a log's beginning, which has a server's arguments (16 kB a process) and limits."""
MOST_LINES = 3
_PREFIX = re.compile(r"^(\[[^\]]*\]|\d{4}-\d\d-\d\d[ T]\S+|[A-Z]+:?\s)\s*")
# for example: torch.OutOfMemoryError: CUDA out of memory / launch_server.py: error: … / Not enough memory.
_CAUSE = re.compile(
    r"^(?:- )?([\w.]*(Error|Exception|Interrupt|Exit)\b: .+|[\w. ]+: error: .+|.*out of memory.*"
    r"|Not enough memory.*|.*address already in use.*|.*Killed$|Subprocess \S+ .*crashed.*)",
    re.IGNORECASE,
)
# errors that follow from another one, which they would hide
_CONSEQUENCE = re.compile(
    r"Scheduler or detokenizer|Received sigquit|Rank \d+ scheduler|exit ?code|EOFError|KeyboardInt"
)
# a killed process (most often by the kernel, for memory) logs no error: those before it are not why it died
_KILLED = re.compile(r"^Subprocess \S+ .*crashed with exit code -9\b")


def cause_in(log: Path, since: int = 0) -> str:
    """Return the one to three lines after byte `since` that best explain a failure, joined by ` / `."""
    lines = [unstamped(line) for line in head_and_tail(log, since)]
    causes = [line for line in lines if _CAUSE.match(line)]
    best = (
        [line for line in lines if _KILLED.match(line)]
        or [line for line in causes if not _CONSEQUENCE.search(line)]
        or causes
    )
    chosen = list(dict.fromkeys(best))[-MOST_LINES:] or [line for line in lines if line][-MOST_LINES:]
    return " / ".join(line[:300] for line in chosen)


def unstamped(line: str) -> str:
    """Return a line without time stamp and colours."""
    return _PREFIX.sub("", clean(line).strip()).strip()


def head_and_tail(log: Path, since: int = 0) -> list[str]:
    """Return the lines of a log's beginning and end from the byte `since` on; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(since)
            head = file.read(HEAD_BYTES)
            file.seek(max(file.tell(), log.stat().st_size - TAIL_BYTES))
            text = head + file.read(2 * TAIL_BYTES)
    except OSError:
        return []
    return text.decode(errors="replace").splitlines()


Kind = Literal["killed", "crash"]

NAMES: Mapping[Phase | Kind, str] = {
    "prefill": "out of memory in prefill",
    "decode": "out of memory in decode",
    "graph": "out of memory at graph capture",
    "general": "out of memory",
    "load": "the weights do not fit",
    "pool": "no room for a KV pool",
    "killed": "killed by the kernel for want of memory",
    "crash": "a crash",
}

KILLED = 128 + 9
"""Exit status of the launcher where SIGKILL ended its server."""


class EndedServer(NamedTuple):
    """Evidence of a server's last life: from its last start to its end, or until now."""

    lines: Sequence[str]
    """Beginning and end of its log."""
    args: Mapping[str, Any] = {}
    """Arguments that it was started with, as `engine.args` has them."""
    exit_code: int | None = None
    """128 + signal where a signal ended it; None while it runs."""
    oom_kills: int = 0
    """Processes of the machine that the kernel has killed since then because memory ran out."""


class Death(NamedTuple):
    """Why a server died."""

    kind: Phase | Kind
    """Phase in which memory ran out; `killed` by the kernel because it ran out; `crash` for anything else."""
    why: str
    """Line of the log that says so, or a sentence."""
    running: int = 0
    """Requests that ran just before, `#running-req` in the log."""

    @property
    def of_memory(self) -> bool:
        """Whether memory ran out: safer arguments may help, and no row is at fault."""
        return self.kind != "crash"


def examine(ended: EndedServer, facts: Facts) -> Death:
    """Diagnose a death; `facts` are read from the server's log."""
    if last := facts.last_trouble:
        return Death(last.phase, unstamped(last.text)[:300], last.running)
    killed = ended.exit_code == KILLED or (facts.died is not None and facts.died.killed)
    if ended.oom_kills and killed:
        return Death("killed", f"killed by the kernel for want of memory ({ended.oom_kills} processes)")
    return Death("crash", f"exit {ended.exit_code}")


CHUNK, RUNNING = ("chunked-prefill-size",), ("max-running-requests",)
POOL = ("max-total-tokens", "mem-fraction-static")
"""The pool of a CPU, and of a GPU."""
GRAPHS = ("cuda-graph-max-bs-decode", *POOL)
"""Smaller graphs, and a smaller pool too: a capture that fails again costs minutes, and prefill may have
graphs."""
NO_GRAPHS = ("cuda-graph-backend-decode", "cuda-graph-backend-prefill")
STEPS: Mapping[Phase | Kind, tuple[tuple[str, ...], ...]] = {
    "prefill": (CHUNK, POOL),
    "decode": (RUNNING, POOL),
    "graph": (GRAPHS, NO_GRAPHS),
    "pool": (POOL,),
    "general": (POOL, CHUNK, RUNNING),
    "killed": (POOL, RUNNING),
}
"""The flags that are changed together after a death; where none of them has a safer value, the next."""


def safer(death: Death, facts: Facts, flags: Flags) -> dict[str, Any]:
    """Return the arguments to change, as `engine.args` has them; empty where none would help."""
    if death.kind == "killed" and not facts.on_cpu:  # a GPU's pool is not in the machine's memory
        return {}
    sign = "no-pool" if death.kind == "pool" else "oom"
    server = Server(facts, running=death.running, why=death.why)
    for names in STEPS.get(death.kind, ()):
        found = [next_setting(sign, name, server, flags) for name in names if sign in FLAGS[name].moves]
        if any(found):
            return {name: value for args in found for name, value in args.items()}
    return {}


MOST_CHANGES = 6
"""Most changes in one run; each costs a start. It is three of the pool's share, two of the chunk, and one."""
_HOPELESS = {
    "killed": "the machine, or our cgroup on it, has too little memory",
    "load": "take more cards (tp-size), quantise (quantization: fp8), or take a larger card",
}


class Healer:
    """Chooses the arguments of the next start after a death, and keeps them in a file for the next run.

    The servers of one engine share a healer: what one of them dies of, the others need not die of too.
    """

    def __init__(self, given: Mapping[str, Any], memory: Memory, incidents: list[Incident]) -> None:
        """Take the job's `engine.args`, and begin with the arguments that worked in an earlier run."""
        learned = recall_safer_flags(memory) or SaferFlags({}, "")
        self.args = {name: value for name, value in learned.args.items() if name_in(given, name) not in given}
        """Safer arguments of the next start, which replace the job's own, or add to them."""
        self._memory = memory
        self._incidents = incidents
        self._changes = 0
        if self.args:
            log.info(
                "starting with %s, %s; engine.args overrules it; delete %s to forget",
                _shown(self.args), learned.why, memory.path,
            )  # fmt: skip
            incidents.append(Incident("recalled", "the engine", learned.why, {"new": self.args}))

    def heal(self, name: str, ended: EndedServer) -> bool:
        """Change `args` after a server's death; return whether they help, so that no row is at fault."""
        facts, flags = read_server(ended)
        death = examine(ended, facts)
        if not death.of_memory:
            return False
        if not self._had_all(ended.args):  # another server died before: this one lacked the changes yet
            return True
        args = safer(death, facts, flags) if self._changes < MOST_CHANGES else {}
        if not args:
            hint = _HOPELESS.get(death.kind, "no safer arguments are left")
            log.warning("%s: %s: %s", name, NAMES[death.kind], hint)
            return False
        self._changes += 1
        old = {name: in_effect(facts, name) for name in args}
        self.args = {**self.args, **args}
        self._why = NAMES[death.kind]
        """Why a server died last."""
        log.warning(
            "%s: %s: %s at the next start (change %d of at most %d)",
            name, self._why, _shown(args, old), self._changes, MOST_CHANGES,
        )  # fmt: skip
        self._incidents.append(
            Incident("healed", name, death.why, {"kind": death.kind, "old": old, "new": args})
        )
        return True

    def outlived(self, args: Mapping[str, Any]) -> None:
        """Write down, for the next run, what was learned; `args` are of a server that runs at a run's end."""
        if self._changes and self._had_all(args):
            why = f"learned on {datetime.now(UTC):%Y-%m-%d} from {self._why}"
            self._memory.try_to_append("safer", SaferFlags(self.args, why))

    def _had_all(self, args: Mapping[str, Any]) -> bool:
        return all(args.get(name) == value for name, value in self.args.items())


def read_server(server: EndedServer) -> tuple[Facts, Flags]:
    """Read a server's log, whose missing arguments are as the server was started; return its flags too."""
    reader = LogReader()
    for line in server.lines:
        reader.take(line)
    logged = reader.facts.arguments
    asked = {name.replace("-", "_"): value for name, value in server.args.items()}
    in_log = {name: value for name, value in logged.items() if value is not None}
    reader.facts.arguments = {**asked, **in_log}
    return reader.facts, of_arguments(None, logged)


def _shown(args: Mapping[str, Any], old: Mapping[str, float | None] = {}) -> str:
    """Write arguments as `chunked-prefill-size 8192 -> 4096`, or the new value alone."""
    before = {name: f"{value} -> " for name, value in old.items() if value is not None}
    return ", ".join(f"{name} {before.get(name, '')}{value}" for name, value in args.items())
