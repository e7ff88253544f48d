"""How many requests a scheduler gets at the start: enough to fill it, few enough not to drown it."""

from __future__ import annotations

UNKNOWN_ENGINE_WINDOW = 256
TYPICAL_PROMPT_TOKENS = 256
TYPICAL_MAX_NEW_TOKENS = 512


def tokens_a_row(max_new_tokens: int | None) -> int:
    """Return the KV tokens that a row holds on average while it runs: its prompt and half of its output."""
    output = TYPICAL_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    return TYPICAL_PROMPT_TOKENS + output // 2


def first_window(
    max_running: int | None, max_total_tokens: int | None, row_tokens: int, low: int, high: int
) -> tuple[int, str]:
    """Return the window and, in a sentence, where it comes from.

    It is max_running_requests and `low` more, so that a place which becomes free is taken in the same
    scheduler step. Where the KV pool decides, how many rows fit is a guess (their lengths are not known):
    then half of `high` is added, which fills the scheduler if they are shorter and stays in the band if not.
    """
    if max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not tell how many requests it runs"
    running, why = max_running, f"max_running_requests {max_running}"
    if max_total_tokens is not None:
        fits = max(1, max_total_tokens // row_tokens)
        if fits + high // 2 < running + low:
            why = f"the KV pool of {max_total_tokens} tokens holds about {fits} requests"
            return fits + high // 2, f"{why}, and {high // 2} waiting"
    return running + low, f"{why}, and {low} waiting"
