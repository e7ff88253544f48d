"""Rules of advice on a server's setup: metrics, GPUs, parallelism, precision, kernels, cache, order.

Each rule is a pure function. A rule on the model or the GPU finds nothing if the model or the GPU is unknown.
A rule that always returns a finding leaves the decision to its flag: without a next value of the flag, there
is no advice.
"""

import re
from typing import Any

from batchrunner.core.console import counted
from batchrunner.sglang.flags import Flags, command_line
from batchrunner.tuning.flags import best_backends, next_setting
from batchrunner.tuning.signals import GUIDES, frequent
from batchrunner.tuning.situation import FEW_PROMPTS, Finding, Situation

ROOM_FOR_KV = 0.6
"""One GPU is enough for a model if all weights take at most this fraction of its memory. The rest holds the
KV pool."""
LONG_ENOUGH = 1024
"""Minimum mean prompt length, in tokens, at which copying a prefix from host memory is cheaper than computing
it."""
_GENERAL = {"triton", "torch_native", "flex_attention", "flashinfer"}
"""Attention backends that run on any GPU. Any other backend was chosen for a reason."""
KEEPS_ORDER = frozenset({"fcfs", "lpm"})
"""Values of `--schedule-policy` that keep the order of arrival (fcfs) or prefer cached prefixes (lpm)."""
OUT_OF_REACH = 0.1
"""The order of rows counts as bad if at least this fraction of the prompt tokens could have come from the
prefix cache but did not."""
PAGED = ("mla", "mha", "dsa", "nsa")
"""Parts of the names of attention backends that need KV cache pages of several tokens."""
LOST_IN_PAGES = 0.15
"""Pages are too large if at least this fraction of a request's KV cache pages is empty."""


def metrics_off(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that the server's metrics, or its counts of cached tokens, are switched off."""
    contents = {
        "enable_metrics": "/metrics (retractions, cache hits, throughput, latency)",
        "enable_cache_report": "cached tokens of each chat answer",
    }
    # An unreported argument is None, not False, so it does not count as off.
    disabled = {name for name in contents if situation.facts.arguments.get(name) is False}
    if situation.facts.metrics is False:
        disabled.add("enable_metrics")
    names = [name for name in contents if name in disabled]
    if not names:
        return None
    args: dict[str, Any] = {}
    for name in names:
        args |= flags.setting(name.replace("_", "-"), value=True)
    missing = " and ".join(contents[name] for name in names)
    return Finding(f"the server does not report {missing}", args=args)


def tensor_parallel(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that a model is split over several GPUs although it fits one, or that GPUs are idle."""
    tp, card_gb, idle = situation.facts.tp, situation.facts.card_gb, situation.facts.idle_gpus
    if idle:
        verb = "is" if idle == 1 else "are"
        return Finding(
            f"{counted(idle, 'GPU')} that the server could use {verb} idle",
            change="`engine: {replicas: auto}`: a replica for every GPU",
            evidence={"idle_gpus": idle},
            certainty="high",
        )
    # A GPU logs its own part of the weights, which tensor and pipeline parallelism divide.
    model_gb = (situation.facts.weights_gb or 0.0) * tp * (situation.facts.number("pp_size") or 1)
    if tp < 2 or situation.facts.on_cpu or not model_gb or not card_gb:  # noqa: PLR2004
        return None
    if model_gb > ROOM_FOR_KV * card_gb:
        return None
    args = flags.setting("tp-size", 1)
    return Finding(
        f"the model ({model_gb:.0f} GB) fits one GPU ({card_gb:.0f} GB), but is split over {tp}",
        args=args,
        change=f"a server for each GPU (`engine: {{replicas: auto}}`), with {command_line(args)}",
        evidence={"weights_gb": round(model_gb, 1), "card_gb": card_gb, "tp": tp},
    )


def data_parallel(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that one server runs data-parallel replicas, which get requests without regard to their load."""
    dp = situation.facts.number("dp_size") or 1
    if dp < 2 or situation.facts.attn_dp > 1:  # noqa: PLR2004
        return None
    return Finding(
        f"--dp-size {dp:.0f} sends requests to replicas in turn, whatever their load",
        args=flags.setting("dp-size", 1),
        change=f"{dp:.0f} servers instead (`engine.replicas`)",
    )


def expert_parallel(situation: Situation, _: Flags) -> Finding:
    """Return the advice on a mixture of experts, each of which is split over several GPUs."""
    return Finding(f"{situation.facts.model} has experts, each of them split over {situation.facts.tp} GPUs")


def dp_attention(situation: Situation, _: Flags) -> Finding:
    """Return the advice on a model with latent attention (MLA), whose KV cache is repeated on each GPU."""
    return Finding(f"{situation.facts.model} keeps the same KV cache on each of {situation.facts.tp} GPUs")


def encoder_unused(situation: Situation, _: Flags) -> Finding:
    """Return the advice on a model whose encoder of images, sounds or videos the job does not use."""
    return Finding(f"{situation.facts.model} accepts images, sounds or videos, but the job has none")


def fixed_guesses(situation: Situation, _: Flags) -> Finding:
    """Return the advice on speculative decoding with a fixed number of guessed tokens per step."""
    return Finding(
        f"{situation.facts.arguments.get('speculative_algorithm')} guesses the same number of tokens in each "
        "step"
    )


def torch_compile(situation: Situation, _: Flags) -> Finding | None:
    """Detect a small model with small batches, for which compiled kernels pay."""
    model_gb = (situation.facts.weights_gb or 0.0) * situation.facts.tp
    if not 0 < model_gb <= GUIDES.small_model_gb or not frequent(situation.load, "small_batch"):
        return None
    return Finding(
        f"a small model ({model_gb:.1f} GB) runs small batches ({situation.server.running:.0f} requests)"
    )


def pool_full(situation: Situation, _: Flags) -> Finding | None:
    """Detect that the KV pool limits the number of running requests."""
    if not frequent(situation.load, "kv_bound"):
        return None
    return Finding(
        f"the KV pool is full {situation.often('kv_bound')}", evidence=situation.evidence("kv_bound")
    )


def shared_prefixes(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that prompts share prefixes, but come in an order with few prefix cache hits."""
    prefills = situation.log.prefills
    share = prefills.cached_share
    # Below this range, prompts share no prefixes. Above it, the order is good already.
    is_to_improve = GUIDES.shared <= share <= GUIDES.cached_well
    if prefills.prompts < FEW_PROMPTS or not is_to_improve:
        return None
    prompt_tokens = prefills.cached_tokens + prefills.new_tokens
    reading = f"{share:.0%} of {prompt_tokens:,} prompt tokens were in the cache"
    evidence = {"cached_share": round(share, 4), "prompts": prefills.prompts}
    if situation.client is not None:
        if situation.client.order in {"auto", "prefix"}:
            # No advice is needed, because the runner already groups rows by their common prefix.
            return None
        reading += ", in the input's order"
        return Finding(reading, args={}, change="`order: auto`", evidence=evidence)
    policy = situation.facts.arguments.get("schedule_policy")
    queue, limit = situation.load.longest_queue, GUIDES.lpm_queue
    is_too_long_for_lpm = queue > limit
    if policy == "lpm" and is_too_long_for_lpm:
        reading += f"; above {limit:.0f} waiting requests, lpm does not look for common prefixes"
    # The flag would not help if lpm is already on or unknown, or if the queue is too long for lpm.
    if policy in {"lpm", None} or is_too_long_for_lpm:
        change = "send requests that begin alike one after another, as batchrun does"
        return Finding(reading, args={}, change=change, evidence=evidence)
    args = next_setting("shared", "schedule-policy", situation.server, flags)
    return Finding(reading, args=args, evidence=evidence)


def host_cache(situation: Situation, _: Flags) -> Finding | None:
    """Detect that prompts share long prefixes, which the KV pool may evict before their next use."""
    prefills = situation.log.prefills
    shares_prefixes = GUIDES.shared <= prefills.cached_share <= GUIDES.cached_well
    if prefills.prompts < FEW_PROMPTS or not shares_prefixes or prefills.mean_prompt < LONG_ENOUGH:
        return None
    if not frequent(situation.load, "full"):
        return None
    return Finding(
        f"prompts of {prefills.mean_prompt:,.0f} tokens share prefixes, {prefills.cached_share:.0%} of their "
        f"tokens were in the cache, and the KV pool is full {situation.often('full')}",
        evidence={"cached_share": round(prefills.cached_share, 4), **situation.evidence("full")},
    )


def attention_backend(situation: Situation, _: Flags) -> Finding | None:
    """Detect a general-purpose attention backend on a GPU for which SGLang has a faster one."""
    backend = situation.facts.arguments.get("attention_backend")
    if backend not in _GENERAL or backend in best_backends(situation.facts)[:1]:
        return None
    # A log lacks the launch command. The user may then have chosen the backend, also in a config file.
    command = situation.facts.arguments.get("launch_command")
    if command and not re.search("attention.backend|--config", str(command)):
        # SGLang itself chose the backend, so there is nothing to advise.
        return None
    return Finding(f"the attention backend is {backend} on {situation.facts.card}")


def cache_off(situation: Situation, _: Flags) -> Finding | None:
    """Detect that the prefix cache is off although prompts share prefixes."""
    shared = situation.client.possible_share if situation.client else None
    if not situation.facts.arguments.get("disable_radix_cache") or shared is None or shared < GUIDES.shared:
        return None
    return Finding(
        f"the prefix cache is off, and {shared:.0%} of the prompt tokens could come from it",
        evidence={"possible_share": round(shared, 4), "computed_tokens": situation.log.prefills.new_tokens},
    )


def order_of_server(situation: Situation, _: Flags) -> Finding | None:
    """Detect that the server reorders rows, and so has fewer prefix cache hits than it could have."""
    policy = situation.facts.arguments.get("schedule_policy")
    shared = situation.client.possible_share if situation.client else None
    if policy is None or policy in KEEPS_ORDER or shared is None:
        return None
    cached = situation.log.prefills.cached_share
    if shared - cached < OUT_OF_REACH or situation.facts.arguments.get("disable_radix_cache"):
        return None
    return Finding(
        f"{cached:.0%} of the prompt tokens were in the cache, although {shared:.0%} could be: "
        f"--schedule-policy {policy} does not take the rows in the order in which they are sent",
        evidence={"cached_share": round(cached, 4), "possible_share": round(shared, 4), "policy": policy},
    )


def pages_large(situation: Situation, _: Flags) -> Finding | None:
    """Detect that requests are short for the page size, so that half-empty last pages waste the KV pool."""
    page = int(situation.facts.number("page_size") or 1)
    prefills = situation.log.prefills
    backend = str(situation.facts.arguments.get("attention_backend"))
    needs_pages = any(name in backend for name in PAGED)
    if page < 2 or needs_pages or not prefills.prompts or not situation.short_of_pool:  # noqa: PLR2004
        return None
    mean_output = situation.client.mean_output if situation.client else None
    tokens = prefills.mean_prompt + (mean_output or 0.0)
    # On average, half of a request's last page is empty.
    wasted_share = page / 2 / (tokens + page / 2)
    if wasted_share < LOST_IN_PAGES:
        return None
    running = situation.load.median("running")
    return Finding(
        f"requests of {tokens:.0f} tokens take pages of {page} tokens: half-empty last pages waste "
        f"{wasted_share:.0%} of the KV pool, and {running:.0f} of at most {situation.max_running} requests "
        "run",
        evidence={
            **situation.evidence("conservative", "kv_bound"),
            "page_tokens": page,
            "lost_share": round(wasted_share, 4),
        },
    )
