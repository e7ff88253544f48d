"""The replies to `/model_info` and `/server_info` → EngineInfo and TokenizerInfo. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad, TokenizerInfo
from batchrunner.core.errors import EngineStartError
from batchrunner.engines.http.status import MOST
from batchrunner.engines.media_facts import media_taken
from batchrunner.engines.model_files import model_identity
from batchrunner.engines.vector_facts import lengths_told

# Server arguments that change the tokens of a chat, or its answer. Where all are unset, the chat endpoint
# does nothing that /generate would not do with the same token ids (serving_chat.py of SGLang 0.5.23).
_CHAT_ARGUMENTS = (
    *("reasoning_parser", "tool_call_parser", "chat_template", "default_chat_template_kwargs"),
    "preferred_sampling_params",
)
_OWN_CHAT_MODELS = {"gpt_oss", "gemma4", "gemma4_unified", "minimax_m3_vl"}
"""Models whose chats SGLang handles in its own way (special tokens in the answer, rules for messages)."""
_ANSWERS_IN_PIECES = ("incremental_streaming_output", "stream_output")
"""Server arguments with which an event has only the text since the last one; the second is older."""
FEW_EVENTS = 256
"""`stream_interval` of a server from which on its events for a row are few."""
FEW_EVENTS_FLAG = "--stream-interval 1000000"
_LPM_NOTE = "the server schedules by lpm, which changes our order while few rows wait: fcfs keeps it"


def describe(
    models: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], loads: Sequence[SchedulerLoad]
) -> EngineInfo:
    """Describe replicas by the `/model_info` and `/server_info` of each, and all their loads, if polled.

    Raises EngineStartError where they serve different models.
    """
    names = {str(model["model_path"]) for model in models}
    if len(names) > 1:
        raise EngineStartError(f"the replicas serve different models: {', '.join(sorted(names))}")
    first = servers[0]
    version = first.get("version")
    version = version if isinstance(version, str) else None
    media = media_taken(models, version)
    return EngineInfo(
        kind="attach",
        model=model_identity(names.pop()),
        version=version,
        max_running=_sum(load.max_running for load in loads)
        or _sum(_resolved(server, "max_running_requests") for server in servers),
        max_total_tokens=_sum(load.max_total_tokens for load in loads)
        or _sum(_resolved(server, "max_total_num_tokens") for server in servers),
        context_length=limit_of(first.get("context_length")) or limit_of(first.get("max_req_input_len")),
        prefill_tokens=prefill_tokens(first),
        caches_prefixes=not first.get("disable_radix_cache"),
        tokenizing=_common_to([*map(tokenizer_info, models, servers)]),
        vector_lengths=lengths_told(models),
        takes_images=media.images,
        takes_audio=media.audio,
        takes_videos=media.videos,
        one_by_one=next(filter(None, map(answers_in_pieces, servers)), None),
        notes=(_LPM_NOTE,) if first.get("schedule_policy") == "lpm" else (),
    )


def answers_in_pieces(server: Mapping[str, Any]) -> str | None:
    """Say why each row should be a request of its own; None where a request can hold several."""
    for name in _ANSWERS_IN_PIECES:
        if server.get(name):
            return f"the server runs with --{name.replace('_', '-')}"
    return None


def events_of_tokens(servers: Iterable[Mapping[str, Any]]) -> str | None:
    """Say why rows do not share requests through a gateway, which drops the interval that requests ask for.

    It is None where each server sends few events for a row by itself.
    """
    intervals = [limit_of(server.get("stream_interval")) or 1 for server in servers]
    if min(intervals) >= FEW_EVENTS:
        return None
    return f"a worker sends an event for every {min(intervals)} tokens; start it with {FEW_EVENTS_FLAG}"


def prefill_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Return the most prompt tokens that one prefill pass takes, by a server's resolved arguments."""
    limits = (limit_of(arguments.get(name)) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    return min((limit for limit in limits if limit), default=None)


def limit_of(value: Any) -> int | None:
    """Return a limit that a server tells, from 1 on; None for anything else."""
    return value if type(value) is int and 0 < value <= MOST else None


def scheduler_states(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each scheduler adds to `/server_info`: its limits in effect, its memory."""
    states = server.get("internal_states")
    return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def limit_in_effect(state: Mapping[str, Any], argument: str) -> Any:
    """Return one scheduler's limit; with DP attention `max_running_requests` is parted among the ranks."""
    own = state.get("effective_max_running_requests_per_dp") if argument == "max_running_requests" else None
    return own or state.get(argument)


def tokenizer_info(model: Mapping[str, Any], server: Mapping[str, Any]) -> TokenizerInfo:
    """Describe how a server makes tokens of prompts."""
    template = server.get("hf_chat_template_name")
    return TokenizerInfo(
        tokenizer=str(server.get("tokenizer_path") or model["model_path"]),
        model=str(model["model_path"]),
        own=_own(model, server),
        own_chat=_own_chat(model, server),
        model_sampling=server.get("sampling_defaults") == "model",
        template=template if isinstance(template, str) else None,
        cuts=bool(server.get("allow_auto_truncate")),
        longest_prompt=limit_of(server.get("max_req_input_len")),
        absent=bool(server.get("skip_tokenizer_init")),
    )


def _sum(limits: Iterable[Any]) -> int | None:
    """Return the sum over all schedulers; None where one of them does not say."""
    found = list(limits)
    return (
        sum(limits)
        if (limits := [n for n in map(limit_of, found) if n]) and len(limits) == len(found)
        else None
    )


def _resolved(server: Mapping[str, Any], argument: str) -> Any:
    """Return a server's limit as its schedulers have it in effect: the argument itself may be null."""
    limits = [limit_in_effect(state, argument) for state in scheduler_states(server)]
    return sum(filter(None, map(limit_of, limits))) or server.get(argument)


def _common_to(found: Sequence[TokenizerInfo]) -> TokenizerInfo:
    """Return what replicas have in common."""
    first = found[0]
    if any(other != first for other in found):
        return TokenizerInfo(first.tokenizer, first.model, own="the replicas' arguments differ")
    return first


def _own(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Say why only the server can make tokens of any prompt; None where the client can too."""
    if "sampling_defaults" not in server:
        return "the server does not tell its arguments"
    for name, usual in (("tokenizer_mode", "auto"), ("tokenizer_backend", "huggingface")):
        if server.get(name, usual) != usual:
            return f"the server runs with {name} {server[name]}"
    if model.get("has_image_understanding") or model.get("has_audio_understanding"):
        return "the model takes more than text"
    return None


def _own_chat(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    """Say why only the server can make tokens of messages; None where the client can too."""
    for name in _CHAT_ARGUMENTS:
        if server.get(name):
            return f"the server runs with --{name.replace('_', '-')}"
    if str(model.get("model_type")) in _OWN_CHAT_MODELS:
        return f"SGLang has chat rules of its own for {model['model_type']}"
    return None
