"""Flag changes that `batchrun tune` tries, by the table of flags and the signs of the best trial.

A flag is tried only if a sign of the best trial calls for it. If none does, a note says so. SGLang's tuning
guides begin with the length of the queue, but no flag sets that. The runner's concurrency law does.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import Job
from batchrunner.sglang.device import cards, free_bytes, gpus, on_cpu
from batchrunner.sglang.flags import CLIP, Flags, installed
from batchrunner.sglang.model_files import cards_of, read_config
from batchrunner.tuning.flags import FLAGS, NEEDS, Flag, Server, beside, with_memory
from batchrunner.tuning.measurement import TrialResult, TrialSigns
from batchrunner.tuning.ngrams import is_exact
from batchrunner.tuning.signals import FLAG_SIGNS, GUIDES, admits_too_few, retracts_often
from batchrunner.tuning.situation import has_media, pool_tokens, sets_sampling


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine and the job that limit which flags a search may try."""

    flags: Flags
    cpu: bool = True
    card: str | None = None
    """Name of the GPU as `nvidia-smi` prints it."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """Largest KV pool, in tokens, that a CPU's memory allows; 0 if unknown."""
    ignores_eos: bool = False
    """Whether the job's outputs have exactly `max_new_tokens`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty if it is not on this machine."""
    cards: int = 1
    """Number of GPUs that all replicas of the job may use together."""
    replicas: int = 1
    """Number of replicas that the job itself asks for."""
    says_tp: bool = False
    """Whether the job sets `engine.tp`, which stands for `--tp-size`."""
    allow_fp8: bool = False
    """Whether smaller number types may be tried, which change answers: 8-bit weights and KV cache, 16-bit
    states."""
    media: bool | None = None
    """Whether prompts have images, sounds or videos; None if unknown."""
    speculates_exactly: bool = True
    """Whether answers keep their distribution with speculation (`ngrams.is_exact`)."""

    def replicas_of(self, args: Mapping[str, Any]) -> int:
        """Return the number of replicas with these flags that fit on the GPUs; at least 1."""
        return max(1, self.cards // cards_of(args))


def machine_for(job: Job, engine: ServerEngine, *, allow_fp8: bool = False) -> Machine:
    """Describe this machine. The installed SGLang is asked for its flags, which takes about 6 s."""
    cpu = on_cpu(engine.device)
    gpu_cards = [] if cpu else cards()
    config = read_config(engine.model, engine.args.get("revision"))
    gpus_a_replica, replicas = cards_of(engine.args), getattr(job.engine, "replicas", 1)
    count = 0 if cpu else len(gpus(engine.env)) or len(gpu_cards)
    if isinstance(replicas, int) and replicas > 1:
        count = replicas * gpus_a_replica  # the job uses only these, even if the machine has more
    prompt = job.prompt.model_dump()
    return Machine(
        flags=installed(engine.python, engine.env),
        cpu=cpu,
        card=gpu_cards[0].name if gpu_cards else None,
        card_gb=gpu_cards[0].memory_bytes / (1 << 30) if gpu_cards else 0.0,
        most_pool_tokens=(pool_tokens(config, free_bytes()) or 0) if cpu else 0,
        ignores_eos=job.sampling.ignore_eos is True,
        config=config,
        cards=max(count, gpus_a_replica),
        replicas=replicas if isinstance(replicas, int) else max(1, count // gpus_a_replica),
        says_tp=getattr(job.engine, "tp", None) is not None,
        allow_fp8=allow_fp8,
        media=has_media(prompt),
        speculates_exactly=is_exact(job.sampling.model_dump()) and sets_sampling(prompt),
    )


Args = dict[str, Any]
PASS_IS_FULL = 0.6
"""The prefill chunk counts as the limit if the mean prefill pass is at least this fraction of it. The mean is
below the chunk even then, because the last pass of a prompt is short."""
GRAPH_OFF_OFTEN = 0.1
"""Larger CUDA graphs are tried if at least this fraction of the decode passes ran without a graph."""


def server_of(result: TrialResult, machine: Machine) -> Server:
    """Convert the result of a trial to the `Server` that the table of flags takes."""
    signs, facts = result.signs, result.facts
    facts = replace(
        facts,
        card=machine.card,
        card_gb=machine.card_gb or None,
        config=machine.config,
        idle_gpus=max(0, machine.cards - facts.gpus),
        arguments={**facts.arguments, "device": "cpu" if machine.cpu else "cuda"},
    )
    return Server(
        facts,
        signs.running / signs.schedulers,
        signs.usage,
        output_tokens=signs.output_tokens,
        longest_output=signs.longest_output,
        shared=signs.cached_share,
        repeated=signs.repeated,
        most_pool_tokens=machine.most_pool_tokens,
        media=machine.media,
        speculates_exactly=machine.speculates_exactly,
    )


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A change of flags to try."""

    args: Args
    why: str


def _waits_below_cap(s: TrialSigns) -> bool:
    """Tell whether requests wait although fewer run than max-running-requests allows."""
    return s.shows("conservative") or s.shows("kv_bound")


SEEN: Mapping[str, Callable[[TrialSigns, Server], bool]] = {
    "layout": lambda _, __: True,
    "held": lambda s, _: admits_too_few(
        share_held=s.shares.get("conservative", 0.0), retracts=retracts_often(s.retractions_per_min)
    ),
    "retracting": lambda s, _: s.shows("kv_bound") and retracts_often(s.retractions_per_min),
    "full": lambda s, _: _waits_below_cap(s),
    "chunk-full": lambda s, v: (s.prefill_per_pass or 0.0) >= PASS_IS_FULL * (v.facts.chunk or 1),
    "capped": lambda s, _: s.shows("capped"),
    "states": lambda s, _: s.shows("states"),
    "graph-off": lambda s, _: (s.graph_off_share or 0.0) >= GRAPH_OFF_OFTEN,
    "reordered": lambda _, __: True,
    "shared": lambda s, _: s.cached_share >= GUIDES.shared and s.queue <= GUIDES.lpm_queue,
    "slow-backend": lambda _, __: True,
    "evicted": lambda s, _: s.cached_share >= GUIDES.shared and s.shows("full"),
    "starved": lambda s, _: s.shows("empty") and not s.shows("at_cap"),
    "split-experts": lambda _, __: True,
    "kv-copies": lambda _, __: True,
    "small-prefills": lambda s, v: (
        s.shows("waiting")
        and (s.prefill_per_pass or math.inf) < GUIDES.small_pass * (v.facts.chunk or 0)
        and (s.decodes_per_prefill or math.inf) < math.sqrt(2 * s.output_tokens)
    ),
    "repeated": lambda _, __: True,
    "no-media": lambda _, v: v.media is False,
    "speculates": lambda _, v: bool(v.facts.arguments.get("speculative_algorithm")),
    "wide-numbers": lambda _, __: True,
}
"""For each sign that calls for a flag, a test of whether a trial shows the sign."""
TUNED_FLAGS = tuple(flag for flag in FLAGS.values() if SEEN.keys() & flag.moves.keys())


def candidates(flag: Flag, best: TrialResult, machine: Machine) -> list[FlagChange] | str:
    """Return the changes of a flag to try after the best trial, the best first, or why there are none."""
    signs, server = best.signs, server_of(best, machine)
    if flag.needs and not NEEDS[flag.needs](server.facts):
        return f"it needs {flag.needs}"
    if flag.changes_answers and not machine.allow_fp8:
        return "it changes answers: only with --allow fp8"
    if machine.ignores_eos and flag.name in {"schedule-conservativeness", CLIP}:
        return "with ignore_eos SGLang reserves all of max_new_tokens, whatever its value"
    figures = f"#running-req {signs.running:.0f}, #queue-req {signs.queue:.0f}, token usage {signs.usage:.2f}"
    calls = [sign for sign in flag.moves if sign in SEEN]
    signs_shown = [sign for sign in calls if SEEN[sign](signs, server)]
    flag_changes: list[FlagChange] = []
    for sign in signs_shown:
        values = flag.values(sign, server)
        settings = [args for value in values for args in _with_others(flag, value, server, machine.flags)]
        if settings and len(more := with_memory(sign, flag.name, server, machine.flags)) > 1:
            settings.append(more)
        warning = "; it changes answers" if flag.changes_answers else ""
        flag_changes += [FlagChange(args, f"{FLAG_SIGNS[sign]}: {figures}{warning}") for args in settings]
    if flag_changes:
        return flag_changes
    if signs_shown:
        return "no further value is left to try, or too little is known"
    return f"not the case: {', '.join(FLAG_SIGNS[sign] for sign in calls)}"


def _with_others(flag: Flag, value: Any, server: Server, flags: Flags) -> list[Args]:
    """Return the settings to try for a value of a flag, each with the flags that must change with it."""
    if flag.name == "tp-size" and server.facts.is_moe:  # Experts may be whole, or split over the GPUs.
        return [{flag.name: value, "ep-size": size} for size in dict.fromkeys((value, 1))]
    others = beside(flag.name, value, server)
    return [{flag.name: value} | {name: other for name, other in others.items() if flags.spelling(name)}]


def together(changes: Collection[FlagChange]) -> FlagChange | None:
    """Combine all changes into one; None if there are fewer than two."""
    args = {name: value for change in changes for name, value in change.args.items()}
    return FlagChange(args, "all that its signs call for") if len(changes) > 1 else None
