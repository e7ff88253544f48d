"""Flag changes that `batchrun tune` tries, by the table of flags and the signs of the best trial.

A flag is tried only if a sign of the best trial calls for it; otherwise a note gives the reason. SGLang's
tuning guides begin with the queue, but no flag sets its length: the runner's concurrency law does.
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
from batchrunner.tuning.signals import FLAG_SIGNS, GUIDES, admits_too_few, retracts_often
from batchrunner.tuning.situation import has_media, pool_tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts on the machine and the job that limit the flags a search may try."""

    flags: Flags
    cpu: bool = True
    card: str | None = None
    """Name of the GPU as `nvidia-smi` prints it."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """Tokens of the largest KV pool that a CPU's memory allows; 0 where that is unknown."""
    ignores_eos: bool = False
    """Whether the job's outputs have exactly `max_new_tokens`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty where it is not on this machine."""
    cards: int = 1
    """GPUs that all replicas of the job may use together."""
    replicas: int = 1
    """The job's own replicas."""
    says_tp: bool = False
    """Whether the job has `engine.tp`, which stands for `--tp-size`."""
    allow_fp8: bool = False
    """Whether narrower numbers may be tried: weights and KV cache of 8 bits, states of 16. Answers change."""
    media: bool | None = None
    """Whether prompts have images, sounds or videos; None where it is unknown."""

    def replicas_of(self, args: Mapping[str, Any]) -> int:
        """Return the number of replicas with these flags that fit on the GPUs; at least 1."""
        return max(1, self.cards // cards_of(args))


def machine_for(job: Job, engine: ServerEngine, *, allow_fp8: bool = False) -> Machine:
    """Describe this machine; asks the installed SGLang for its flags, which takes about 6 s."""
    cpu = on_cpu(engine.device)
    gpu_cards = [] if cpu else cards()
    config = read_config(engine.model, engine.args.get("revision"))
    gpus_a_replica, replicas = cards_of(engine.args), getattr(job.engine, "replicas", 1)
    count = 0 if cpu else len(gpus(engine.env)) or len(gpu_cards)
    if isinstance(replicas, int) and replicas > 1:
        count = replicas * gpus_a_replica  # the job uses only these, even if the machine has more
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
        media=has_media(job.prompt.model_dump()),
    )


Args = dict[str, Any]
PASS_IS_FULL = 0.6
"""Least mean prefill pass, as a share of the chunk, that makes the chunk the limit: last passes are short."""
GRAPH_OFF_OFTEN = 0.1
"""Least share of the decode passes without a graph at which larger graphs are tried."""


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
"""For each sign that calls for a flag: the test whether a trial shows it."""
TUNED_FLAGS = tuple(flag for flag in FLAGS.values() if SEEN.keys() & flag.moves.keys())


def candidates(flag: Flag, best: TrialResult, machine: Machine) -> list[FlagChange] | str:
    """Return the changes of a flag to try after the best trial, best first, or why there are none."""
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
        settings = [args for value in flag.values(sign, server) for args in _with_others(flag, value, server)]
        if settings and len(more := with_memory(sign, flag.name, server, machine.flags)) > 1:
            settings.append(more)
        warning = "; it changes answers" if flag.changes_answers else ""
        flag_changes += [FlagChange(args, f"{FLAG_SIGNS[sign]}: {figures}{warning}") for args in settings]
    if flag_changes:
        return flag_changes
    if signs_shown:
        return "no further value is left to try, or too little is known"
    return f"not the case: {', '.join(FLAG_SIGNS[sign] for sign in calls)}"


def _with_others(flag: Flag, value: Any, server: Server) -> list[Args]:
    """Return the settings to try for a value of a flag, each with the flags that must change with it."""
    if flag.name == "tp-size" and server.facts.is_moe:  # Experts are split over GPUs, or whole.
        return [{flag.name: value, "ep-size": size} for size in dict.fromkeys((value, 1))]
    most = server.now("max-running-requests")
    if flag.name == "speculative-algorithm" and most:
        fits = 2 ** math.ceil(math.log2(max(server.running, 1)))
        return [{flag.name: value, "max-running-requests": min(int(most), fits)}]
    return [{flag.name: value} | beside(flag.name, value, server)]


def together(changes: Collection[FlagChange]) -> FlagChange | None:
    """Combine all changes into one; None for fewer than two."""
    args = {name: value for change in changes for name, value in change.args.items()}
    return FlagChange(args, "all that its signs call for") if len(changes) > 1 else None
