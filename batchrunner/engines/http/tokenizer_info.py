"""What SGLang says of how it makes tokens of prompts, and of what it alone does to a chat: pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchrunner.core.types import TokenizerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Arguments of the server that change what it makes of a chat, or of its answer: where they are unset, nothing
# happens there that does not happen to token ids (serving_chat.py of SGLang 0.5.23).
_CHAT_ARGUMENTS = (
    *("reasoning_parser", "tool_call_parser", "chat_template", "default_chat_template_kwargs"),
    "preferred_sampling_params",
)
_OWN_CHAT_MODELS = {"gpt_oss", "gemma4", "gemma4_unified", "minimax_m3_vl"}
"""Models for whose chats SGLang has a way of its own (special tokens in the answer, rules for messages)."""


def tokenizing_of(model: Mapping[str, Any], server: Mapping[str, Any]) -> TokenizerInfo:
    """Read a server's `/model_info` and `/server_info`."""
    return TokenizerInfo(
        tokenizer=str(server.get("tokenizer_path") or model["model_path"]),
        model=str(model["model_path"]),
        own=_own(model, server),
        own_chat=_own_chat(model, server),
        model_sampling=server.get("sampling_defaults") == "model",
        template=server.get("hf_chat_template_name"),
        cuts=bool(server.get("allow_auto_truncate")),
        longest_prompt=server.get("max_req_input_len"),
        absent=bool(server.get("skip_tokenizer_init")),
    )


def same_for_all(found: Sequence[TokenizerInfo]) -> TokenizerInfo:
    """Return what replicas have in common."""
    first = found[0]
    if any(other != first for other in found):
        return TokenizerInfo(first.tokenizer, first.model, own="the replicas' arguments differ")
    return first


def _own(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    if "sampling_defaults" not in server:
        return "the server does not tell its arguments"
    for name, usual in (("tokenizer_mode", "auto"), ("tokenizer_backend", "huggingface")):
        if server.get(name, usual) != usual:
            return f"the server runs with {name} {server[name]}"
    if model.get("has_image_understanding") or model.get("has_audio_understanding"):
        return "the model takes more than text"
    return None


def _own_chat(model: Mapping[str, Any], server: Mapping[str, Any]) -> str | None:
    for name in _CHAT_ARGUMENTS:
        if server.get(name):
            return f"the server runs with --{name.replace('_', '-')}"
    if model.get("model_type") in _OWN_CHAT_MODELS:
        return f"SGLang has chat rules of its own for {model['model_type']}"
    return None
