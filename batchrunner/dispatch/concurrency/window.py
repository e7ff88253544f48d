"""The first window of a scheduler: enough requests to fill it, too few to flood its queue."""

from batchrunner.core.engine_info import LEAST_LOW, EngineInfo, QueueBand

UNKNOWN_ENGINE_WINDOW = 256
"""First window for an engine that does not say how many requests it runs."""
TYPICAL_PROMPT_TOKENS = 256
"""Assumed unless the prompts that were read before the run are shorter. For longer ones a smaller first
window made jobs of a minute up to 2 % slower in virtual time, and a long queue at the start costs nothing."""
TYPICAL_MAX_NEW_TOKENS = 512
"""Assumed if the job sets no `max_new_tokens`, or takes it from a column."""
SHORT_OUTPUT_TOKENS = 256
"""Most `max_new_tokens` with which prompts that are known to be short count as such. Rows with longer outputs
grow together: a larger first window had five times as many of them retracted, at the same throughput."""
BYTES_A_TOKEN, BYTES_AN_ID = 3, 4
"""Bytes of a prompt that stand for a token, of a text and of token ids. Of a text few: too many rows at the
start cost more than too few."""


def tokens_a_row(max_new_tokens: int | None, prompt_tokens: float | None = None) -> int:
    """Return the KV tokens that a row holds on average while it runs: its prompt and half its output.

    `prompt_tokens` are the prompt's on average, without those that the prefix cache holds; None if unknown.
    """
    output = TYPICAL_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompt = TYPICAL_PROMPT_TOKENS
    if prompt_tokens is not None and output <= SHORT_OUTPUT_TOKENS:
        prompt = min(prompt, max(1, round(prompt_tokens)))
    return prompt + output // 2


def cost_of_connections(info: EngineInfo, fixed: int | None) -> str | None:
    """Return what too few connections cost, in a line; None where they are enough.

    `fixed` is the job's window, if it sets one; else as many are needed as the engine can run.
    """
    wanted = fixed or info.max_running or UNKNOWN_ENGINE_WINDOW
    if info.connections is None or info.connections >= wanted:
        return None
    who = "the job's window is" if fixed else "the engine can run"
    return (
        f"at most {info.connections} requests can be in flight, and {who} {wanted}: up to "
        f"{1 - info.connections / wanted:.0%} of the speed is lost. The limit is {info.connections_by}: "
        "raise it (ulimit -Hn, LimitNOFILE, or the container's --ulimit nofile)"
    )


def first_window(
    max_running: int | None, max_total_tokens: int | None, row_tokens: int, low: int, high: int
) -> tuple[int, str]:
    """Return the window and, in a sentence, where it comes from; `low` and `high` bound the queue band.

    The window is max_running_requests plus `low`, so that a slot which becomes free is filled in the same
    scheduler step. If the KV pool holds far fewer, their number takes the place of max_running_requests.
    It is a guess, since lengths are not known: too low a one doubles at the next load samples, while what is
    sent too early cannot be taken back. Rows that begin together grow together, until they do not fit.
    """
    if max_running is None:
        return UNKNOWN_ENGINE_WINDOW, "the engine does not tell how many requests it runs"
    running, why = max_running, f"max_running_requests {max_running}"
    if max_total_tokens is not None:
        fits = max(1, max_total_tokens // row_tokens)
        if fits + high // 2 < running + low:
            why = f"the KV pool of {max_total_tokens} tokens holds about {fits} requests"
            return fits + low, f"{why}, and {low} waiting"
    return running + low, f"{why}, and {low} waiting"


USUAL_TOKENS = 8192
"""Prompt tokens of a pass where the server does not tell: SGLang's chunk on cards of 80 GB."""
FIRST_ROW_TOKENS = 256
"""Tokens that a row is expected to have before any was sent."""
MEMORY_ROWS = 2000
"""Rows over which the average is taken: of older ones, less and less is left."""
DEEPEST = 8
"""Passes in the queue above which more rows in it only wait."""
FIRST_PASSES = 4
"""Passes in flight at first: one is computed, one waits, and one travels in each direction."""


class ForwardPasses:
    """The passes of an engine's schedulers, by the rows that were sent."""

    def __init__(self, tokens: int | None) -> None:
        """Take the most prompt `tokens` of a pass; None where the server does not tell them."""
        self.tokens = tokens or USUAL_TOKENS
        """Most prompt tokens of a pass."""
        self._row_tokens = float(FIRST_ROW_TOKENS)
        self._rows = 0

    def sent(self, tokens: int) -> None:
        """Count a row that is sent, with the tokens of its prompt."""
        self._rows += 1
        self._row_tokens += (tokens - self._row_tokens) / min(self._rows, MEMORY_ROWS)

    def rows(self, max_running: int | None) -> int:
        """Return the rows of a pass, for a scheduler that runs so many requests at once; 1 at least."""
        rows = max(1, round(self.tokens / max(1.0, self._row_tokens)))
        return rows if max_running is None else min(rows, max_running)

    def first_window(self, max_running: int | None) -> int:
        """Return how many rows a scheduler gets before its load is known."""
        return max(LEAST_LOW, FIRST_PASSES * self.rows(max_running))

    def band(self, max_running: int | None) -> QueueBand:
        """Return the healthy `#queue-req` of a scheduler: from the rows of one pass to those of several."""
        rows = self.rows(max_running)
        return QueueBand(
            max(LEAST_LOW, rows), DEEPEST * max(LEAST_LOW, rows), f"a forward pass takes about {rows} rows"
        )
