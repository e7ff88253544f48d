"""Which flags tuning tries, and when: by the table of flags and the signs of the best trial. Pure.

A flag is tried only where a sign of the best trial calls for it; else a note says why not. The queue comes
first in SGLang's tuning guides, but is no flag: the runner's own controller holds it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchrunner.advise.situation import pool_tokens
from batchrunner.engines.device import cards, free_bytes, on_cpu
from batchrunner.engines.flag_table import FLAGS, NEEDS, SIGNS, Flag, Server, with_memory
from batchrunner.engines.flags import CLIP, Flags, installed, name_in
from batchrunner.engines.logs.lines import ServerReady
from batchrunner.engines.logs.reader import Facts
from batchrunner.engines.logs.series import GUIDES
from batchrunner.engines.model_files import read_config
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import Job
from batchrunner.tune.measurement import TrialSigns


@dataclass(frozen=True, slots=True)
class Machine:
    """What a search may change, and what it has to know of the device."""

    flags: Flags
    cpu: bool = True
    card: str | None = None
    """Name of the GPU, as `nvidia-smi` prints it."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """Tokens of the largest KV pool that a CPU's memory allows; 0 where that is not known."""
    ignores_eos: bool = False
    """Whether the job's outputs have exactly `max_new_tokens`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty where it is not on this machine."""


def machine_for(job: Job, engine: ServerEngine) -> Machine:
    """Describe this machine; asks the installed SGLang for its flags, which takes about 6 s."""
    cpu = on_cpu(engine.device)
    card = None if cpu else next(iter(cards()), None)
    config = read_config(engine.model, engine.args.get("revision"))
    return Machine(
        flags=installed(engine.python, engine.env),
        cpu=cpu,
        card=card.name if card else None,
        card_gb=card.memory_bytes / (1 << 30) if card else 0.0,
        most_pool_tokens=(pool_tokens(config, free_bytes()) or 0) if cpu else 0,
        ignores_eos=job.sampling.ignore_eos is True,
        config=config,
    )


Args = dict[str, Any]
PASS_IS_FULL = 0.7
"""Mean share of the limit from which it bounds the prefill passes; the last pass of a prompt is short."""
GRAPH_OFF_OFTEN = 0.1
"""Share of the decode passes without a graph from which larger graphs are tried."""


@dataclass(frozen=True, slots=True)
class TuningState:
    """The best setting so far, with its signs."""

    args: Args
    signs: TrialSigns
    machine: Machine

    def value(self, name: str, default: Any) -> Any:
        """Return a flag's value, under any of its names; the default where it is unset or null."""
        found = self.args.get(name_in(self.args, name))
        return default if found is None else found

    @property
    def server(self) -> Server:
        """The server of the best trial, as the table of flags takes it."""
        signs, machine = self.signs, self.machine
        told = {"mem-fraction-static": signs.mem_fraction, "attention-backend": signs.attention_backend}
        values = {name: self.value(name, told.get(name)) for name in (*FLAGS, "tp-size", "dp-size")}
        facts = Facts(
            arguments={name.replace("-", "_"): value for name, value in values.items()},
            ready=ServerReady(
                signs.pool_tokens, signs.prefill_limit, signs.max_running, gpu_gb=signs.spare_gb
            ),
            card=machine.card, card_gb=machine.card_gb or None, model=signs.model, config=machine.config,
        )  # fmt: skip
        facts.arguments["device"] = "cpu" if machine.cpu else "cuda"
        return Server(facts, signs.running, signs.usage, most_pool_tokens=machine.most_pool_tokens)


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A change to try."""

    args: Args
    why: str


def _admits_too_few(s: TrialSigns) -> bool:
    """Tell whether requests wait although fewer run than max-running-requests allows."""
    return s.waits and not s.at_limit


SEEN: Mapping[str, Callable[[TrialSigns], bool]] = {
    "held": lambda s: _admits_too_few(s) and not s.full,
    "retracting": lambda s: (
        _admits_too_few(s) and s.full and s.retractions_per_min > GUIDES.retractions_per_min
    ),
    "full": _admits_too_few,
    "chunk-full": lambda s: (s.prefill_per_pass or 0.0) >= PASS_IS_FULL * (s.prefill_limit or 1),
    "capped": lambda s: s.waits and s.at_limit and not s.full,
    "graph-off": lambda s: (s.graph_off_share or 0.0) >= GRAPH_OFF_OFTEN,
    "reordered": lambda _: True,
    "shared": lambda s: s.cached_share >= GUIDES.shared and s.queue <= GUIDES.lpm_queue,
    "slow-backend": lambda _: True,
    "evicted": lambda s: s.cached_share >= GUIDES.shared and s.full,
    "starved": lambda s: not s.waits and not s.at_limit,
    "split-experts": lambda _: True,
    "kv-copies": lambda _: True,
}
"""Whether a trial shows a sign."""
TUNED_FLAGS = tuple(
    flag for flag in FLAGS.values() if SEEN.keys() & flag.moves.keys() and not flag.changes_answers
)


def candidates(flag: Flag, state: TuningState) -> list[FlagChange] | str:
    """Return changes of a flag, the most promising first; or a text that says why none is tried."""
    signs, server = state.signs, state.server
    if flag.needs and not NEEDS[flag.needs](server.facts):
        return f"it needs {flag.needs}"
    if state.machine.ignores_eos and flag.name in {"schedule-conservativeness", CLIP}:
        return "with ignore_eos SGLang reserves all of max_new_tokens, whatever its value"
    figures = f"#running-req {signs.running:.0f}, #queue-req {signs.queue:.0f}, token usage {signs.usage:.2f}"
    calls = [sign for sign in flag.moves if sign in SEEN]
    seen = [sign for sign in calls if SEEN[sign](signs)]
    found: list[FlagChange] = []
    for sign in seen:
        settings = [{flag.name: value} for value in flag.values(sign, server)]
        if settings and len(more := with_memory(sign, flag.name, server, state.machine.flags)) > 1:
            settings.append(more)
        found += [FlagChange(args, f"{SIGNS[sign]}: {figures}") for args in settings]
    if found:
        return found
    if seen:
        return "no further value is left to try, or too little is known"
    return f"not the case: {', or '.join(SIGNS[sign] for sign in calls)}"
