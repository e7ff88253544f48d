"""Divides an engine's slots among accounts (owners of runs) that use the engine at the same time.

No I/O, and no clock.

Weighted fair queueing: each account has a virtual time, which is the cost of its rows divided by its share.
Slots go to the accounts whose virtual times are lowest. So accounts that always have rows to send get work in
proportion to their shares, whatever the lengths of their prompts and answers. Equal numbers of slots would
not be fair. A scheduler prefills before it decodes, so an account with long prompts and short answers could
block all others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchrunner.core.types import Completion

OUTPUT_COST = 2.0
"""Cost of an output token without its context, as a multiple of a prompt token. By the estimate `H100_8B` (in
engines/simulation/replica.py), a prompt token takes 29 µs. An output token takes 39 µs when 256 requests run,
and 110 µs when 64 run."""
CONTEXT_COST = 1 / 600
"""Cost of reading one context token while one output token is generated, as a multiple of a prompt token. By
the estimate `H100_8B`, the read takes 49 ns."""
ROW_COST = 2
"""Cost of a row besides its tokens, in prompt tokens. It is small, because SGLang's HTTP process works beside
the engine. At 0, an account whose rows are all refused would get all slots."""
FIRST_ROW_COST = 1000.0
"""Assumed cost of a row in prompt tokens, until a row of any account has ended."""
SHORTEST_ROW_S = 0.001
"""Assumed minimum time of a row, in seconds."""
ROWS_AVERAGED = 32
"""Maximum number of recent rows over which the cost of a row is averaged."""
CATCH_UP_S = 2.0
"""Time, in seconds, over which an account may catch up with the others. Slots are divided again at each poll
of the load. With a shorter time, an account that is behind would get all slots until the next poll. It would
then be far ahead, and get none."""
BISECTIONS = 50
"""Number of steps of the bisection that finds how many slots each account gets."""


@dataclass(slots=True, eq=False)
class Account:
    """An owner of runs, with the cost of its rows. Its runs share its slots, the oldest run first."""

    share: float = 1.0
    """Weight of the account. Accounts with rows to send share the engine in proportion to their weights."""
    most_tokens: int | None = None
    """No row is sent once `tokens` reaches this number; None if there is no limit."""
    tokens: int = 0
    """Prompt and output tokens of the ended rows. A program that sets `most_tokens` may reset this count."""
    cost: float = 0.0
    """Cost of the ended rows, in prompt tokens. It also grows while the account uses less than its share, so
    that unused time cannot be saved up."""
    rows_averaged: int = 0
    """Number of ended rows over which `row_cost` is averaged, at most ROWS_AVERAGED. It is 0 if no cost is
    known yet, and ROWS_AVERAGED if `row_cost` was copied from other accounts."""
    row_cost: float = FIRST_ROW_COST
    """Mean cost of a recent row, in prompt tokens."""
    row_s: float = CATCH_UP_S
    """Mean time in seconds for which a recent row held its slot."""
    prompt_tokens: float = 0.0
    """Estimated mean number of prompt tokens per row of the account's newest run."""

    @property
    def is_paused(self) -> bool:
        """Whether the account has used all of its tokens."""
        return self.most_tokens is not None and self.tokens >= self.most_tokens

    @property
    def time(self) -> float:
        """Virtual time: the cost of the ended rows divided by the share."""
        return self.cost / self.share

    @property
    def slot_cost(self) -> float:
        """Expected cost of the rows that one slot completes in CATCH_UP_S; at least the cost of one row."""
        return self.row_cost * max(1.0, CATCH_UP_S / max(self.row_s, SHORTEST_ROW_S))

    def add(self, answer: Completion | None, seconds: float) -> None:
        """Count a row that ended after `seconds`; `answer` is None if the server refused the row."""
        cost: float = ROW_COST
        if answer is not None:
            prompt, output = answer.prompt_tokens or 0, answer.output_tokens
            computed_prompt = prompt - (answer.cached_tokens or 0)
            mean_context = prompt + output / 2
            cost += computed_prompt + output * (OUTPUT_COST + CONTEXT_COST * mean_context)
            self.tokens += prompt + output
        self.cost += cost
        self.rows_averaged = min(self.rows_averaged + 1, ROWS_AVERAGED)
        self.row_cost += (cost - self.row_cost) / self.rows_averaged
        self.row_s += (seconds - self.row_s) / self.rows_averaged

    def expect_prompts(self, tokens: float) -> None:
        """Raise `row_cost` to at least `tokens`, the mean number of prompt tokens of a new run's rows."""
        self.prompt_tokens = tokens
        self.row_cost = max(self.row_cost, tokens)

    def change_share(self, share: float) -> None:
        """Change the share. The cost is scaled too, so that the virtual time does not jump."""
        self.cost *= share / self.share
        self.share = share

    def advance_to(self, time: float) -> None:
        """Raise the virtual time to `time`, unless it is later already.

        The virtual time is the cost of the account's rows divided by its share.
        """
        self.cost = max(self.cost, time * self.share)

    def begin_beside(self, in_flight: Mapping[Account, int]) -> None:
        """Raise the virtual time to the lowest of the other accounts, so that this one has no advantage.

        `in_flight` has the number of rows in flight of each other account. They count as ended if the cost of
        the account's rows is known.

        If no row of this account has ended yet, its rows are assumed to take the mean time and cost of the
        other accounts' rows. Their cost is at least the length of their prompts.
        """
        known = [other for other in in_flight if other.rows_averaged]
        if known and not self.rows_averaged:
            mean_cost = math.fsum(other.row_cost for other in known) / len(known)
            self.row_cost, self.rows_averaged = max(mean_cost, self.prompt_tokens), ROWS_AVERAGED
            self.row_s = math.fsum(other.row_s for other in known) / len(known)
        # The virtual times of the other accounts, as if their rows in flight had ended.
        times = [
            (other.cost + (rows * other.row_cost if other in known else 0.0)) / other.share
            for other, rows in in_flight.items()
        ]
        self.advance_to(min(times))

    def slots_until(self, time: float) -> float:
        """Return how many slots, over all servers, would raise the account's virtual time to `time`."""
        return max(0.0, (time * self.share - self.cost) / self.slot_cost)


class Claim(NamedTuple):
    """What one run needs of a server's slots."""

    account: Account
    in_flight: int
    """Number of slots that the run has now."""
    ready: int
    """Number of further slots that the run could use now."""
    unsent: int
    """Number of rows that the run still has to send."""

    @property
    def wanted(self) -> int:
        """Number of slots that the run could use; 0 if its account has used all of its tokens."""
        return 0 if self.account.is_paused else self.in_flight + self.ready


def divide(slots: int, claims: Sequence[Claim], *, routes: int = 1) -> list[int]:
    """Divide a server's slots among runs; the claim of the oldest run comes first.

    Each account gets slots until its virtual time would reach a common value, but no more than its runs can
    use. The runs of an account get its slots in order of age. Slots that no run wants go to the oldest run
    that may send rows. The accounts have slots on `routes` servers in all.
    """
    # Slots that each account can use now, and all its rows without an answer.
    wanted, unanswered = defaultdict[Account, int](int), defaultdict[Account, int](int)
    for claim in claims:
        wanted[claim.account] += claim.wanted
        unanswered[claim.account] += claim.in_flight + claim.unsent
    slots_left = _slots_of_accounts(slots, wanted, routes)
    limited = [account for account in wanted if slots_left[account] < wanted[account]]
    # An account that uses less than its share falls behind in virtual time. It must not save up this time, so
    # its virtual time is raised to the lowest one of the accounts that need more.
    if limited:
        earliest = min(account.time for account in limited)
        for account in wanted:
            if slots_left[account] >= unanswered[account]:
                account.advance_to(earliest)
    unused = slots - sum(slots_left.values())
    parts = []
    for claim in claims:
        part = min(claim.wanted, slots_left[claim.account])
        slots_left[claim.account] -= part
        # The first claim is the oldest run's. It gets all unused slots if it may send rows.
        if unused and not claim.account.is_paused:
            part, unused = part + unused, 0
        parts.append(part)
    return parts


def _slots_of_accounts(slots: int, wanted: dict[Account, int], routes: int) -> dict[Account, int]:
    """Divide a server's slots among the accounts by their virtual times.

    If there are enough slots, each account gets all that it wants. Otherwise each account gets slots until
    its virtual time would reach a common value. There are `routes` servers, and each provides an equal part
    of an account's slots.
    """
    if sum(wanted.values()) <= slots:
        return {**wanted}

    def slots_until(time: float) -> dict[Account, float]:
        return {account: min(most, account.slots_until(time) / routes) for account, most in wanted.items()}

    # Find, by bisection, the highest common virtual time for which the slots suffice.
    too_early = min(account.time for account in wanted)
    too_late = max(account.time + slots * routes * account.slot_cost / account.share for account in wanted)
    for _ in range(BISECTIONS):
        middle = (too_early + too_late) / 2
        if sum(slots_until(middle).values()) < slots:
            too_early = middle
        else:
            too_late = middle
    exact = slots_until(too_late)
    whole = {account: math.floor(number) for account, number in exact.items()}
    # Slots left over by rounding go to the accounts that lost most by it.
    by_loss = sorted(exact, key=lambda account: whole[account] - exact[account])
    unused = slots - sum(whole.values())
    for account in by_loss:
        extra = min(unused, 1, wanted[account] - whole[account])
        whole[account] += extra
        unused -= extra
    return whole
