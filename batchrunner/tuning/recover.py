"""Recovery: diagnose a server's death, and choose arguments for the next start.

`examine` diagnoses a death by the server's log, its exit status and the kernel's count of kills. `safer`
names arguments that need less memory, by SGLang's tuning guides. They depend on the phase in which memory ran
out:

- in prefill: smaller chunks; in decode: fewer running requests; at graph capture: smaller graphs;
- if the flag of the phase has no smaller value: a smaller fraction of the GPU's memory for the KV pool;
- if the phase is unknown: a smaller KV pool, then smaller chunks, then fewer running requests;
- on a CPU, where the size of the KV pool is a number of tokens: a smaller number;
- if a hybrid model's states have no room: a larger pool for them, then fewer running requests.

Advice proposes these arguments. If a server that the run started dies, its `Healer` restarts it with them,
and remembers those that worked.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from batchrunner.core.engine_info import Incident
from batchrunner.sglang.flags import Flags, name_in, of_arguments
from batchrunner.sglang.logs.causes import unstamped
from batchrunner.sglang.logs.lines import Phase
from batchrunner.sglang.logs.reader import Facts, LogReader
from batchrunner.tuning.flags import FLAGS, Server, in_effect, next_setting
from batchrunner.tuning.memory import Memory, SaferFlags, recall_safer_flags

log = logging.getLogger(__name__)

Kind = Literal["killed", "crash"]
"""Cause of a death that SGLang's log does not report as an out-of-memory error."""

NAMES: Mapping[Phase | Kind, str] = {
    "prefill": "out of memory in prefill",
    "decode": "out of memory in decode",
    "states": "the state pool is too small",
    "graph": "out of memory at graph capture",
    "general": "out of memory",
    "load": "the weights do not fit",
    "pool": "no room for a KV pool",
    "killed": "killed by the kernel for lack of memory",
    "crash": "a crash",
}
"""Cause of a server's death in words, by its kind."""

KILLED = 128 + 9
"""Exit status of the launcher if SIGKILL ended its server."""


class EndedServer(NamedTuple):
    """Evidence about a server that ended, since its last start."""

    lines: Sequence[str]
    """First and last lines of its log."""
    args: Mapping[str, Any] = {}
    """Arguments with which the server was started, as in `engine.args`."""
    exit_code: int | None = None
    """Exit code of the server: 128 + the signal's number if a signal ended it; None while it runs."""
    oom_kills: int = 0
    """Number of processes that the kernel has killed since the start, because the machine's memory ran out.
    """


class Death(NamedTuple):
    """The cause of a server's death."""

    kind: Phase | Kind
    """Phase in which memory ran out, `killed` if the kernel killed the server for lack of memory, or else
    `crash`."""
    why: str
    """Log line or sentence that names the cause."""
    running: int = 0
    """Requests that ran just before the death, `#running-req` in the log."""

    @property
    def of_memory(self) -> bool:
        """Whether memory ran out. If so, safer arguments may help, and no row is at fault."""
        return self.kind != "crash"


def examine(ended: EndedServer, facts: Facts) -> Death:
    """Find the cause of a server's death from its exit code and the facts in its log."""
    if last := facts.last_trouble:
        return Death(last.phase, unstamped(last.text)[:300], last.running)
    killed = ended.exit_code == KILLED or (facts.died is not None and facts.died.killed)
    if ended.oom_kills and killed:
        return Death("killed", f"killed by the kernel for lack of memory ({ended.oom_kills} processes)")
    return Death("crash", f"exit {ended.exit_code}")


CHUNK = ("chunked-prefill-size",)
"""Flag that sets the memory of a prefill pass."""
RUNNING = ("max-running-requests",)
"""Flag that sets the number of requests that decode at once."""
POOL = ("max-total-tokens", "mem-fraction-static")
"""Flags that set the size of the KV pool: on a CPU, and on a GPU."""
GRAPHS = ("cuda-graph-max-bs-decode", *POOL)
"""Flags to change after CUDA graphs could not be captured. The KV pool shrinks too, because prefill may have
graphs as well, and another failure would cost minutes."""
STATES = ("mamba-full-memory-ratio", "max-mamba-cache-size")
"""Flags that set the size of a hybrid model's state pool. Which of the two applies depends on the server's
arguments."""
NO_GRAPHS = ("cuda-graph-backend-decode", "cuda-graph-backend-prefill")
"""Flags that switch CUDA graphs off."""
FLAGS_AFTER: Mapping[Phase | Kind, tuple[tuple[str, ...], ...]] = {
    "prefill": (CHUNK, POOL),
    "decode": (RUNNING, POOL),
    "states": (STATES, RUNNING),
    "graph": (GRAPHS, NO_GRAPHS),
    "pool": (POOL,),
    "general": (POOL, CHUNK, RUNNING),
    "killed": (POOL, RUNNING),
}
"""Groups of flags to change after a death. The flags of a group change together. If none of them has a safer
value, the next group changes."""


def safer(death: Death, facts: Facts, flags: Flags) -> dict[str, Any]:
    """Return the arguments to change, as in `engine.args`; empty if none would help."""
    # The kernel kills a process if the host's memory runs out. A smaller pool on the GPU would not free host
    # memory.
    if death.kind == "killed" and not facts.on_cpu:
        return {}
    # State pool flags react to the sign "no-states", all other flags to the first one.
    signs = {"no-pool" if death.kind == "pool" else "oom", "no-states"}
    server = Server(facts, running=death.running, death_line=death.why)
    for group in FLAGS_AFTER.get(death.kind, ()):
        args: dict[str, Any] = {}
        for name in group:
            for sign in signs & FLAGS[name].moves.keys():
                args |= next_setting(sign, name, server, flags)
        if args:
            return args
    return {}


MOST_CHANGES = 6
"""Maximum number of changes of a server's arguments in one run, since each costs a restart. Six allow three
changes of the KV pool's size, two of the chunk size and one more."""
_HOPELESS = {
    "killed": "the machine, or the cgroup of this run, has too little memory",
    "load": "use more GPUs (tp-size), quantise (quantization: fp8), or use a GPU with more memory",
}
"""Advice if no argument helps, by the kind of the death."""


class Healer:
    """Chooses safer server arguments after each death, and saves those that worked for later runs.

    The servers of one engine share a healer, so that no second server dies of the same cause.
    """

    def __init__(self, job_args: Mapping[str, Any], memory: Memory, incidents: list[Incident]) -> None:
        """Begin with arguments that worked in an earlier run, except those that `job_args` sets."""
        learned = recall_safer_flags(memory) or SaferFlags({}, "")
        # `name_in` finds the job's own spelling of a flag that the job sets.
        self.args = {
            name: value for name, value in learned.args.items() if name_in(job_args, name) not in job_args
        }
        """Safer arguments for the next start; they override the job's own."""
        self._memory = memory
        self._incidents = incidents
        self._changes = 0
        self._last_cause = ""
        if self.args:
            log.info(
                "starting with %s, %s; engine.args overrules it; delete %s to forget",
                _shown(self.args),
                learned.why,
                memory.path,
            )
            incidents.append(Incident("recalled", "the engine", learned.why, {"new": self.args}))

    def heal(self, name: str, ended: EndedServer) -> bool:
        """Store safer arguments in `args` after a server's death; return whether the next start may succeed.

        If so, no row is to blame for the death.
        """
        facts, flags = read_server(ended)
        death = examine(ended, facts)
        if not death.of_memory:
            return False
        if not self._had_all(ended.args):
            # The server lacked arguments that were changed after another server's death. They may help this
            # server too.
            return True
        args = safer(death, facts, flags)
        if not args or self._changes == MOST_CHANGES:
            hint = _HOPELESS.get(death.kind, "no safer arguments are left")
            if args:
                hint = f"given up after {MOST_CHANGES} changes of its arguments; {_shown(args)} would be next"
            log.warning("%s: %s: %s", name, NAMES[death.kind], hint)
            return False
        self._changes += 1
        old = {name: in_effect(facts, name) for name in args}
        self.args = {**self.args, **args}
        self._last_cause = NAMES[death.kind]
        log.warning(
            "%s: %s: %s at the next start (change %d of at most %d)",
            name,
            self._last_cause,
            _shown(args, old),
            self._changes,
            MOST_CHANGES,
        )
        self._incidents.append(
            Incident("healed", name, death.why, {"kind": death.kind, "old": old, "new": args})
        )
        return True

    def outlived(self, args: Mapping[str, Any]) -> None:
        """Save the changed arguments for later runs, if `args` has all of them.

        `args` are the arguments of a server that survived to the end of the run.
        """
        newest = recall_safer_flags(self._memory)
        # Another server of the run may have recorded the same arguments.
        is_known = newest is not None and newest.args == self.args
        if self._changes and self._had_all(args) and not is_known:
            why = f"learned on {datetime.now(UTC):%Y-%m-%d} from {self._last_cause}"
            self._memory.try_to_append("safer", SaferFlags(self.args, why))

    def _had_all(self, args: Mapping[str, Any]) -> bool:
        return all(args.get(name) == value for name, value in self.args.items())


def read_server(server: EndedServer) -> tuple[Facts, Flags]:
    """Read a server's facts and flags from its log.

    Arguments that the log lacks come from `server.args`.
    """
    reader = LogReader()
    for line in server.lines:
        reader.take(line)
    log_arguments = reader.facts.arguments
    start_arguments = {name.replace("-", "_"): value for name, value in server.args.items()}
    in_log = {name: value for name, value in log_arguments.items() if value is not None}
    reader.facts.arguments = {**start_arguments, **in_log}
    return reader.facts, of_arguments(None, log_arguments)


def _shown(args: Mapping[str, Any], old: Mapping[str, float | None] = {}) -> str:
    """Format arguments as `chunked-prefill-size 8192 -> 4096`, or without the old value if it is unknown."""
    before = {name: f"{value} -> " for name, value in old.items() if value is not None}
    return ", ".join(f"{name} {before.get(name, '')}{value}" for name, value in args.items())
