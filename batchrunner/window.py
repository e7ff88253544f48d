"""How many requests are in flight at the start: enough to fill the engine, few enough not to drown it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchrunner.job import FromColumn
    from batchrunner.records import EngineInfo

UNKNOWN_ENGINE_WINDOW = 256
TYPICAL_PROMPT_TOKENS = 256
TYPICAL_MAX_NEW_TOKENS = 512
MOST_WAITING = 150
"""The low end of SGLang's healthy `#queue-req` (100-2000 by its tuning guide), with some room."""
LEAST_WAITING = 16


def initial_window(
    asked: Literal["auto"] | int, info: EngineInfo, max_new_tokens: int | FromColumn
) -> tuple[int, str]:
    """Return the window and, in a sentence, where it comes from.

    `auto` is what the engine can run at once, min(max_running_requests, KV tokens / tokens a request
    holds on average: prompt + half of its output), plus a queue of 150 (fewer where it runs fewer), so
    that a place which becomes free is taken in the same scheduler step.
    """
    window, why = (asked, "set by the job") if asked != "auto" else _auto(info, max_new_tokens)
    if info.connections is not None and window > info.connections:
        note = next((n for n in info.notes if "limited by" in n), "")
        return info.connections, f"window {info.connections} instead of {window} ({why}): {note}"
    return window, f"window {window} ({why})"


def _auto(info: EngineInfo, max_new_tokens: int | FromColumn) -> tuple[int, str]:
    if info.max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not tell how many requests it runs"
    output = max_new_tokens if isinstance(max_new_tokens, int) else TYPICAL_MAX_NEW_TOKENS
    running, why = info.max_running, f"max_running_requests {info.max_running}"
    if info.max_total_tokens is not None:
        fits = max(1, info.max_total_tokens // (TYPICAL_PROMPT_TOKENS + output // 2))
        if fits < running:
            running, why = fits, f"the KV pool of {info.max_total_tokens} tokens holds about {fits} requests"
    waiting = min(MOST_WAITING, max(LEAST_WAITING, running))
    return running + waiting, f"{why}, and {waiting} waiting"
