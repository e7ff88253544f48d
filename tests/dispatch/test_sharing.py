"""Runs that use an engine at once share its slots by the cost of their rows."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.types import Completion
from batchrunner.dispatch.sharing import ROW_COST, Account, Claim, divide
from batchrunner.engines.simulation.replica import H100_8B, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest


def answer_of(prompt_tokens: int, output_tokens: int) -> Completion:
    """Return an answer with these numbers of tokens."""
    return Completion(
        texts=["a"],
        finish_reasons=["stop"],
        completion_tokens=[output_tokens],
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        columns={},
    )


@given(slots=st.integers(1, 5000), ready=st.lists(st.integers(0, 2000), min_size=1, max_size=12))
def test_equal_runs_have_equal_slots(slots: int, ready: list[int]) -> None:
    """All slots are given, and no run that wants more has fewer than another, but for one slot."""
    parts = divide(slots, [Claim(Account(), 0, count, count) for count in ready])
    assert sum(parts) == slots
    least = min((part for part, want in zip(parts, ready, strict=True) if part < want), default=slots)
    assert all(part <= least + 1 for part, want in zip(parts, ready, strict=True) if part <= want)


def test_slots_by_weight_and_by_age() -> None:
    """Accounts have slots by their shares; within an account the oldest run has all that it wants."""
    light, heavy = Account(share=1), Account(share=3)
    claims = [Claim(light, 0, 10, 500), Claim(heavy, 0, 500, 500), Claim(light, 0, 500, 500)]
    assert divide(100, claims) == [10, 75, 15]


def test_an_account_without_tokens_has_no_slots() -> None:
    """An account gets no slot once its tokens are used up, not even one that nobody else wants."""
    poor, rich = Account(most_tokens=10), Account()
    claims = [Claim(poor, 5, 5, 50), Claim(rich, 0, 3, 3)]
    assert divide(20, claims) == [17, 3]
    poor.add(answer_of(prompt_tokens=8, output_tokens=2), seconds=1.0)
    assert divide(20, claims) == [0, 20]
    assert divide(20, claims[:1]) == [0]


def test_unused_time_is_not_saved_up() -> None:
    """An account that had little to do for long has its share later, and not more."""
    busy, idle = Account(), Account()
    for _ in range(1000):
        busy.add(answer_of(100, 100), seconds=5.0)
    divide(100, [Claim(busy, 90, 100, 1000), Claim(idle, 1, 0, 0)])
    assert idle.cost == busy.cost
    idle.row_cost = busy.row_cost
    assert divide(100, [Claim(busy, 90, 100, 1000), Claim(idle, 1, 500, 500)]) == [50, 50]


def test_a_new_account_gets_its_part_soon() -> None:
    """A new run has half of the slots once the rows that were in flight before it have ended."""
    busy, new = Account(), Account()
    for _ in range(100):
        busy.add(answer_of(100, 100), seconds=5.0)
    new.begin_beside({busy: 40})
    claims = [Claim(busy, 40, 100, 1000), Claim(new, 0, 100, 1000)]
    assert divide(40, claims) == [40, 0]
    for _ in range(40):
        busy.add(answer_of(100, 100), seconds=5.0)
    assert divide(40, claims) == [20, 20]


def test_a_new_account_beside_one_without_ended_rows() -> None:
    """While no row of any run has ended, the runs have equal numbers of slots."""
    first, new = Account(), Account()
    new.begin_beside({first: 40})
    assert divide(40, [Claim(first, 40, 100, 1000), Claim(new, 0, 100, 1000)]) == [20, 20]


def test_what_a_row_costs() -> None:
    """Cached prompt tokens cost nothing, output tokens cost more in a long context, a refusal a little."""
    costs = []
    for answer in (None, answer_of(1000, 0), answer_of(1000, 0)._replace(cached_tokens=900),
                   answer_of(1000, 100), answer_of(10_000, 100)):  # fmt: skip
        account = Account()
        account.add(answer, seconds=1.0)
        costs.append(account.cost - ROW_COST)
    assert costs[:3] == [0, 1000, 100]
    assert 200 < costs[3] - 1000 < costs[4] - 10_000


@dataclass(eq=False)
class Sender:
    """A run that never ends."""

    prompt_tokens: int
    output_tokens: int
    share: float = 1.0
    window: int = 0
    in_flight: int = 0
    ended: int = 0
    """Rows that ended after the first part of the time."""
    sent_at: dict[SimulatedRequest, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.account = Account(share=self.share)
        self.account.expect_prompts(self.prompt_tokens)

    def request(self, luck: random.Random) -> SimulatedRequest:
        prompt, output = (
            max(1, round(tokens * luck.uniform(0.5, 1.5)))
            for tokens in (self.prompt_tokens, self.output_tokens)
        )
        return SimulatedRequest(prompt, output, max_new_tokens=2 * self.output_tokens, payload=self)


SLOTS, POLL_S, TICK_S = 300, 0.25, 0.05


def rates(senders: list[Sender], seconds: int) -> list[float]:
    """Return the rows a second of senders that share a simulated H100, after the first third of the time."""
    luck, replica = random.Random(1), Replica(SchedulerConfig(256, 500_000), H100_8B)
    for tick in range(round(seconds / TICK_S)):
        for end in replica.advance(tick * TICK_S):
            sender, sample = end.sample.payload, end.sample
            sender.in_flight -= 1
            sender.ended += tick * TICK_S > seconds / 3
            seconds = tick * TICK_S - sender.sent_at.pop(sample)
            sender.account.add(answer_of(sample.prompt_tokens, sample.outputs), seconds=seconds)
        if tick % round(POLL_S / TICK_S) == 0:
            claims = [Claim(sender.account, sender.in_flight, 1000, 10**6) for sender in senders]
            for sender, part in zip(senders, divide(SLOTS, claims), strict=True):
                sender.window = part
        for sender in senders:
            while sender.in_flight < sender.window and sum(each.in_flight for each in senders) < SLOTS:
                request = sender.request(luck)
                replica.scheduler.submit(request)
                sender.sent_at[request] = tick * TICK_S
                sender.in_flight += 1
    return [sender.ended / (seconds * 2 / 3) for sender in senders]


KINDS = {"chats": (500, 300), "documents": (6000, 100), "labels": (3000, 1)}
"""Mean tokens of prompts and of answers."""


@pytest.mark.parametrize("weights", [(1, 1), (1, 3)])
@pytest.mark.parametrize("kinds", [("chats", "documents"), ("chats", "labels")])
def test_shares_of_engine_time(kinds: tuple[str, str], weights: tuple[int, int]) -> None:
    """Each account does at least 0.9 of its share of what it would do alone, whatever the other one sends."""
    alone = [rates([Sender(*KINDS[kind])], 150)[0] for kind in kinds]
    senders = [Sender(*KINDS[kind], weight) for kind, weight in zip(kinds, weights, strict=True)]
    for rate, rate_alone, weight in zip(rates(senders, 600), alone, weights, strict=True):
        assert rate / rate_alone >= 0.9 * weight / sum(weights)


@dataclass(eq=False)
class ShortRows:
    """A run whose rows all take the same time, which is a small part of the time between two polls."""

    row_ms: int
    prompt_tokens: int
    routes: int
    account: Account = field(default_factory=Account)

    def __post_init__(self) -> None:
        self.windows = [0] * self.routes
        self.ends: list[deque[int]] = [deque() for _ in range(self.routes)]
        """Times at which the rows in flight end, by route, in milliseconds."""

    def end_rows(self, now: int) -> None:
        for ends in self.ends:
            while ends and ends[0] <= now:
                ends.popleft()
                self.account.add(answer_of(self.prompt_tokens, 1), seconds=self.row_ms / 1000)

    def send_rows(self, now: int) -> None:
        for window, ends in zip(self.windows, self.ends, strict=True):
            ends.extend([now + self.row_ms] * max(0, window - len(ends)))


def resize(runs: list[ShortRows], slots: int) -> None:
    """Divide the slots of each route as `LoadControl` does: a run gets only slots that are free."""
    for route in range(runs[0].routes):
        claims = [Claim(run.account, len(run.ends[route]), 1000, 10**6) for run in runs]
        free = slots - sum(claim.in_flight for claim in claims)
        parts = divide(slots, claims, routes=runs[0].routes)
        for run, claim, part in zip(runs, claims, parts, strict=True):
            run.windows[route] = min(part, claim.in_flight + free)
            free -= max(0, run.windows[route] - claim.in_flight)


def parts_after_join(first: ShortRows, second: ShortRows, slots: int) -> list[float]:
    """Return the second run's part of all windows at each poll after it has joined the first one."""
    runs, parts = [first], []
    for now in range(0, 12_000, 10):
        for run in runs:
            run.end_rows(now)
        if now == 3100:
            second.account.begin_beside({first.account: sum(map(len, first.ends))})
            runs.append(second)
            resize(runs, slots)
        elif now % 250 == 0:
            resize(runs, slots)
            if second in runs:
                parts.append(sum(second.windows) / sum(first.windows + second.windows))
        for run in runs:
            run.send_rows(now)
    return parts


@pytest.mark.parametrize("routes", [1, 4])
@pytest.mark.parametrize(
    ("rows", "part"),
    [(((20, 20), (20, 20)), 0.5), (((20, 20), (50, 200)), 0.22), (((50, 200), (20, 20)), 0.78)],
)
def test_rows_that_are_shorter_than_a_poll(
    rows: tuple[tuple[int, int], tuple[int, int]], part: float, routes: int
) -> None:
    """A new run gets its part of the slots within some polls, and no run ever gets all of them or none."""
    first, second = (ShortRows(row_ms, prompt_tokens, routes) for row_ms, prompt_tokens in rows)
    parts = parts_after_join(first, second, slots=40)
    assert all(0.05 < each < 0.95 for each in parts)
    assert all(abs(each - part) < 0.06 for each in parts[12:])
