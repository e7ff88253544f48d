"""Chooses the flag changes that `batchrun tune` tries, from the load in the best trial.

The table `FLAGS` lists for each flag the observations (signs) that call for a change. A flag is tried only if
the best trial shows one of them. Otherwise a note says so. No flag sets the queue length, which the runner
controls by its concurrency limit.
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
from batchrunner.tuning.flags import FLAGS, NEEDS, Flag, Server, companions_of, with_memory
from batchrunner.tuning.measurement import TrialResult, TrialSigns
from batchrunner.tuning.ngrams import is_exact
from batchrunner.tuning.signals import FLAG_SIGNS, GUIDES, admits_too_few, retracts_often
from batchrunner.tuning.situation import has_media, pool_tokens, sets_sampling


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine and the job that limit which flags a search may try."""

    flags: Flags
    """Flags of the installed version of SGLang."""
    cpu: bool = True
    """Whether the model runs on a CPU."""
    card: str | None = None
    """Name of the GPU as `nvidia-smi` prints it; None without a GPU."""
    card_gb: float = 0.0
    """Memory of one GPU in GB; 0 without a GPU."""
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
    """Whether the job sets `--tp-size` by its field `engine.tp`."""
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
    """Return the facts about this machine and the job. Asking SGLang for its flags takes about 6 s."""
    cpu = on_cpu(engine.device)
    gpu_cards = [] if cpu else cards()
    config = read_config(engine.model, engine.args.get("revision"))
    # An engine that already runs has no field `replicas`.
    gpus_a_replica, replicas = cards_of(engine.args), getattr(job.engine, "replicas", 1)
    # Count the GPUs that the job's environment allows, or all GPUs of the machine.
    gpu_count = 0 if cpu else len(gpus(engine.env)) or len(gpu_cards)
    if isinstance(replicas, int) and replicas > 1:
        # The job cannot use more GPUs than these, even if the machine has more.
        gpu_count = replicas * gpus_a_replica
    prompt = job.prompt.model_dump()
    return Machine(
        flags=installed(engine.python, engine.env),
        cpu=cpu,
        card=gpu_cards[0].name if gpu_cards else None,
        card_gb=gpu_cards[0].memory_bytes / (1 << 30) if gpu_cards else 0.0,
        most_pool_tokens=(pool_tokens(config, free_bytes()) or 0) if cpu else 0,
        ignores_eos=job.sampling.ignore_eos is True,
        config=config,
        cards=max(gpu_count, gpus_a_replica),
        replicas=replicas if isinstance(replicas, int) else max(1, gpu_count // gpus_a_replica),
        says_tp=getattr(job.engine, "tp", None) is not None,
        allow_fp8=allow_fp8,
        media=has_media(prompt),
        speculates_exactly=is_exact(job.sampling.model_dump()) and sets_sampling(prompt),
    )


Args = dict[str, Any]
"""Flags of the server and their values, as in `engine.args`."""
PASS_IS_FULL = 0.6
"""The chunk size limits prefill if a mean prefill pass has at least this fraction of a chunk. It is below 1,
because the last pass of a prompt is short."""
GRAPH_OFF_OFTEN = 0.1
"""Larger CUDA graphs are tried if at least this fraction of the decode passes ran without one."""


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
        # The table of flags takes the mean of one scheduler.
        running=signs.running / signs.schedulers,
        usage=signs.usage,
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
    """Flags to change, with their new values."""
    why: str
    """The observation that calls for the change, with its figures, in words."""


def _holds_back(signs: TrialSigns) -> bool:
    """Tell whether the server often queues requests although it has room, and retracts few."""
    held_share, retracts = signs.shares.get("conservative", 0.0), retracts_often(signs.retractions_per_min)
    return admits_too_few(share_held=held_share, retracts=retracts)


def _has_small_prefills(signs: TrialSigns, server: Server) -> bool:
    """Tell whether decoding stops for small prefill passes more often than the best interval would."""
    if not signs.shows("waiting") or not signs.prefill_per_pass or not signs.decodes_per_prefill:
        return False
    is_small = signs.prefill_per_pass < GUIDES.small_pass * (server.facts.chunk or 0)
    return is_small and signs.decodes_per_prefill < math.sqrt(2 * signs.output_tokens)


SEEN: Mapping[str, Callable[[TrialSigns, Server], bool]] = {
    "layout": lambda _, __: True,
    "held": lambda s, _: _holds_back(s),
    "retracting": lambda s, _: s.shows("kv_bound") and retracts_often(s.retractions_per_min),
    # Requests wait although fewer run than `max-running-requests` allows.
    "full": lambda s, _: s.shows("conservative") or s.shows("kv_bound"),
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
    "small-prefills": _has_small_prefills,
    "repeated": lambda _, __: True,
    "no-media": lambda _, v: v.media is False,
    "speculates": lambda _, v: bool(v.facts.arguments.get("speculative_algorithm")),
    "wide-numbers": lambda _, __: True,
}
"""For each observation (sign) that calls for a flag, the test whether a trial shows it."""
TUNED_FLAGS = tuple(flag for flag in FLAGS.values() if SEEN.keys() & flag.moves.keys())
"""Flags that trials may show to need a change."""


def candidates(flag: Flag, best: TrialResult, machine: Machine) -> list[FlagChange] | str:
    """Return the changes of a flag to try after the best trial, in order, or why there are none."""
    signs, server = best.signs, server_of(best, machine)
    if flag.needs and not NEEDS[flag.needs](server.facts):
        return f"it needs {flag.needs}"
    if flag.changes_answers and not machine.allow_fp8:
        return "changes answers, so the flag is tried only with --allow fp8"
    if machine.ignores_eos and flag.name in {"schedule-conservativeness", CLIP}:
        return "has no effect with ignore_eos, because SGLang then reserves all of max_new_tokens"
    figures = f"#running-req {signs.running:.0f}, #queue-req {signs.queue:.0f}, token usage {signs.usage:.2f}"
    warning = "; it changes answers" if flag.changes_answers else ""
    possible_signs = [sign for sign in flag.moves if sign in SEEN]
    signs_shown = [sign for sign in possible_signs if SEEN[sign](signs, server)]
    flag_changes: list[FlagChange] = []
    for sign in signs_shown:
        settings: list[Args] = []
        for value in flag.values(sign, server):
            settings += _with_others(flag, value, server, machine.flags)
        # If the first value needs more memory than is free, `with_memory` adds a smaller KV pool. That
        # setting is tried too.
        with_smaller_pool = with_memory(sign, flag.name, server, machine.flags)
        if settings and len(with_smaller_pool) > 1:
            settings.append(with_smaller_pool)
        why = f"{FLAG_SIGNS[sign]}: {figures}{warning}"
        flag_changes += [FlagChange(args, why) for args in settings]
    if flag_changes:
        return flag_changes
    if signs_shown:
        return "no further value is left to try, or the server does not report enough to choose one"
    return f"its signs did not show: {', '.join(FLAG_SIGNS[sign] for sign in possible_signs)}"


def _with_others(flag: Flag, value: Any, server: Server, flags: Flags) -> list[Args]:
    """Return the combinations to try for a value of a flag, with the flags that must change with it."""
    # With a mixture of experts, each GPU may hold a slice of every expert or some whole experts. Try both.
    if flag.name == "tp-size" and server.facts.is_moe:
        return [{flag.name: value, "ep-size": size} for size in dict.fromkeys((value, 1))]
    others = companions_of(flag.name, value, server)
    # Flags that this version of SGLang lacks are left out.
    return [{flag.name: value} | {name: other for name, other in others.items() if flags.spelling(name)}]


def together(changes: Collection[FlagChange]) -> FlagChange | None:
    """Combine all changes into one; None if there are fewer than two."""
    args = {name: value for change in changes for name, value in change.args.items()}
    return (
        FlagChange(args, "all changes that the signs of the best trial call for")
        if len(changes) > 1
        else None
    )
