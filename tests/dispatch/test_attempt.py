"""What becomes of a row whose attempt failed: the table, the pauses, and the evidence against a row.

Rows that are always refused are given up; those that are refused by chance, or in an outage, are not.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from itertools import product

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    NoAnswerError,
    PreemptedError,
    RequestError,
    RowRefusedError,
    UnreachedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import EMBEDDINGS_PATH, RequestBody
from batchrunner.dispatch.attempt import (
    FAILED,
    REJECTED,
    RULES,
    UNAVAILABLE,
    FailedAttempt,
    FailureHistory,
    FailureKind,
    Fate,
    RefusalCause,
    cause_of,
    control_for,
    fate_of,
    kind_of,
    pause_before_retry,
)
from batchrunner.dispatch.queue import PendingRow
from batchrunner.dispatch.route import Doubt, Route, RouteRecord
from tests.support.prompts import request

K = FailureKind


def test_each_error_has_a_kind() -> None:
    """A refusal is the server's only where the server sent one."""
    refusal = RowRefusedError("status 400: too long")
    refusal.body = b"{}"
    kinds = {
        RowRefusedError("min_new_tokens exceeds max_new_tokens"): K.INVALID,
        refusal: K.REFUSED,
        AttemptFailedError("status 500"): K.FAILED,
        NoAnswerError("no answer within 600 s"): K.NO_ANSWER,
        EngineBusyError("status 503"): K.BUSY,
        EngineDownError("no connection"): K.DOWN,
        UnreachedError("no connection to the worker"): K.UNREACHED,
        EngineDiedError("connection lost"): K.DIED,
        PreemptedError("aborted"): K.PREEMPTED,
        RequestError("any other"): K.INVALID,
    }
    assert {str(error): kind_of(error) for error in kinds} == {str(e): kind for e, kind in kinds.items()}


@pytest.mark.parametrize(
    ("attempt", "fate"),
    [
        # rows that we took back ourselves, whatever else is known of them
        (FailedAttempt(K.PREEMPTED), Fate.REQUEUE),
        (
            FailedAttempt(K.PREEMPTED, failures=9, deaths=9, is_culprit=True, is_engine_lost=True),
            Fate.REQUEUE,
        ),
        # rows that are at fault
        (FailedAttempt(K.INVALID), Fate.END),
        (FailedAttempt(K.INVALID, has_other_route=True), Fate.END),
        (FailedAttempt(K.REFUSED), Fate.END),
        (FailedAttempt(K.REFUSED, has_other_route=True), Fate.ASK_ANOTHER),
        (FailedAttempt(K.REFUSED, has_other_route=True, is_confirmed=True), Fate.END),
        (FailedAttempt(K.REFUSED, is_confirmed=True), Fate.END),
        # servers that failed, perhaps because of the row
        (FailedAttempt(K.FAILED), Fate.RETRY),
        (FailedAttempt(K.FAILED, failures=4), Fate.RETRY),
        (FailedAttempt(K.FAILED, failures=5), Fate.END),
        (FailedAttempt(K.FAILED, failures=1, max_attempts=1), Fate.END),
        (FailedAttempt(K.FAILED, has_other_route=True), Fate.ASK_ANOTHER),
        (FailedAttempt(K.FAILED, has_other_route=True, failures=5), Fate.ASK_ANOTHER),
        (FailedAttempt(K.FAILED, has_other_route=True, is_confirmed=True), Fate.RETRY),
        (FailedAttempt(K.FAILED, has_other_route=True, is_confirmed=True, failures=5), Fate.END),
        (FailedAttempt(K.NO_ANSWER), Fate.RETRY),
        (FailedAttempt(K.NO_ANSWER, failures=5), Fate.END),
        (FailedAttempt(K.NO_ANSWER, has_other_route=True), Fate.ASK_ANOTHER),
        # servers that take no row for now: no number of attempts ends the row
        (FailedAttempt(K.BUSY), Fate.RETRY),
        (FailedAttempt(K.BUSY, failures=100), Fate.RETRY),
        (FailedAttempt(K.BUSY, has_other_route=True), Fate.RETRY),
        (FailedAttempt(K.BUSY, is_culprit=True), Fate.BLAME),
        (FailedAttempt(K.BUSY, is_culprit=True, is_engine_lost=True), Fate.BLAME),
        (FailedAttempt(K.BUSY, is_engine_lost=True), Fate.LOSE_ENGINE),
        (FailedAttempt(K.BUSY, was_refused=True), Fate.END_REFUSED),
        (FailedAttempt(K.BUSY, was_refused=True, is_culprit=True, is_engine_lost=True), Fate.END_REFUSED),
        (FailedAttempt(K.DOWN), Fate.RETRY),
        (FailedAttempt(K.DOWN, is_culprit=True), Fate.BLAME),
        (FailedAttempt(K.DOWN, is_engine_lost=True), Fate.LOSE_ENGINE),
        (FailedAttempt(K.DOWN, was_refused=True), Fate.END_REFUSED),
        # servers that died: at the fourth death the row was the only suspect in flight
        (FailedAttempt(K.DIED, deaths=1), Fate.RETRY),
        (FailedAttempt(K.DIED, deaths=3), Fate.RETRY),
        (FailedAttempt(K.DIED, deaths=4), Fate.BLAME),
        (FailedAttempt(K.DIED, deaths=1, is_engine_lost=True), Fate.LOSE_ENGINE),
        (FailedAttempt(K.DIED, deaths=4, is_engine_lost=True), Fate.BLAME),
        (FailedAttempt(K.DIED, deaths=1, was_refused=True), Fate.END_REFUSED),
    ],
)
def test_the_table(attempt: FailedAttempt, fate: Fate) -> None:
    assert fate_of(attempt) == fate


def test_the_table_decides_every_attempt() -> None:
    """No facts are without a fate, every line of the table is needed, and a fate fits its kind."""
    used = set()
    booleans = (False, True)
    for kind in K:
        for facts in product(booleans, booleans, booleans, (1, 5), (5,), (1, 4), booleans, booleans):
            attempt = FailedAttempt(kind, *facts)
            number = next(n for n, rule in enumerate(RULES) if kind in rule.kinds and rule.applies(attempt))
            used.add(number)
            fate = fate_of(attempt)
            assert (fate is Fate.REQUEUE) == (kind is K.PREEMPTED)
            assert fate is not Fate.RETRY or kind not in REJECTED
            assert fate is not Fate.LOSE_ENGINE or (attempt.is_engine_lost and kind in UNAVAILABLE)
            assert fate is not Fate.END or kind in REJECTED | FAILED
            assert fate is not Fate.ASK_ANOTHER or attempt.has_other_route
    assert used == {*range(len(RULES))}


def test_a_route_in_doubt_is_not_in_order() -> None:
    """One that has answered nothing since it failed a row proves nothing by refusing another."""
    route = Route("a", doubt=Doubt("status 500"))
    route.record.last = request(0, "answered")
    assert not FailureHistory(refused_by=(route,)).was_refused


def test_the_history_of_a_row() -> None:
    """Failures count where no other route is asked; what a route in order refused stays known."""
    history, a, b = FailureHistory(), Route("a"), Route("b")
    refusal = RowRefusedError("too long")
    history.add(K.REFUSED, Fate.ASK_ANOTHER, a, refusal)
    assert (history.refused_by, history.refusal, history.avoided) == ((a,), refusal, (a,))
    a.record.last = request(0, "answered")
    assert history.was_refused
    failure = AttemptFailedError("status 500")
    history.add(K.FAILED, Fate.ASK_ANOTHER, b, failure)
    assert (history.failures, history.avoided) == (0, (a, b))
    history.add(K.FAILED, Fate.RETRY, b, failure)
    assert (history.failures, history.failed_on) == (1, (b,))
    history.add(K.REFUSED, Fate.END, b, refusal)
    assert history.refused_by == (a,)
    history.add(K.DIED, Fate.RETRY, a, EngineDiedError("connection lost"))
    assert history.deaths == 1
    assert str(history.blame(K.DIED, failure)).startswith("the engine died 1 times")


counts = st.integers(1, 10) | st.integers(1, 10_000)  # small ones are where pauses still grow
jitters = st.floats(0, 1, exclude_max=True)


@given(attempts=counts, jitter=jitters)
def test_pauses_stay_in_the_upper_half(attempts: int, jitter: float) -> None:
    """No pause is shorter than half of its ceiling or longer than the longest."""
    ceiling = min(TIMING.longest_retry, TIMING.first_retry * 2.0 ** min(attempts, 1000) / 2)
    pause_s = pause_before_retry(EngineBusyError("503"), attempts=attempts, jitter=jitter)
    assert ceiling / 2 <= pause_s <= ceiling


@given(attempts=counts, jitter=jitters, retry_after_s=st.floats(0, 3600))
def test_retry_after_is_a_floor(attempts: int, jitter: float, retry_after_s: float) -> None:
    """A server's Retry-After is heeded up to half a minute, and never makes a pause shorter."""
    plain_s = pause_before_retry(EngineBusyError("503"), attempts=attempts, jitter=jitter)
    busy = EngineBusyError("503", retry_after_s)
    pause_s = pause_before_retry(busy, attempts=attempts, jitter=jitter)
    assert pause_s == max(plain_s, min(retry_after_s, TIMING.longest_retry))


MAX_ATTEMPTS = 5
ANSWER_S = 0.05


class Engine:
    """A route in virtual time, and the rows that are sent to it until each is answered or given up."""

    def __init__(self, refuses: Callable[[int | None, float], bool], refusal_s: float) -> None:
        self.refuses, self.refusal_s = refuses, refusal_s
        self.record, self.rng, self.now = RouteRecord(), random.Random(1), 0.0
        self.ends: list[tuple[float, int, PendingRow | None, float, bool]] = []
        self.retries: list[tuple[float, int, PendingRow]] = []
        self.number = 0
        self.given_up: dict[int, int] = {}

    def send(self, row: PendingRow | None) -> None:
        """Send a row, or a control."""
        self.number += 1
        if row is not None:
            row.attempts, row.sent_at = row.attempts + 1, self.now
        refused = self.refuses(None if row is None else row.request.ref.row, self.now)
        end = self.now + (self.refusal_s if refused else ANSWER_S)
        heapq.heappush(self.ends, (end, self.number, row, self.now, refused))

    def end_next(self) -> None:
        """Go on to the next end of a request."""
        self.now, _, row, sent_at, refused = heapq.heappop(self.ends)
        if not refused:
            self.record.record_answer(sent_at, is_counted=row is None or row.attempts == 1)
        elif row is None:
            self.record.record_refusal()
        else:
            self.refused(row)
        self.record.has_control = self.record.has_control and row is not None

    def refused(self, row: PendingRow) -> None:
        """Give a row up, or send it again later."""
        history = row.failures = row.failures or FailureHistory()
        refusals = history.record_refusal(self.record, sent_at=row.sent_at, now=self.now)
        cause = cause_of(refusals, self.record, others_in_flight=bool(self.ends), max_attempts=MAX_ATTEMPTS)
        if cause is RefusalCause.ROW:
            self.given_up[row.request.ref.row] = row.attempts
            return
        if cause is RefusalCause.NEEDS_CONTROL:
            self.record.has_control = True
            self.send(None)
        busy = EngineBusyError("503")
        pause_s = pause_before_retry(busy, attempts=row.attempts, jitter=self.rng.random())
        heapq.heappush(self.retries, (self.now + pause_s, self.number, row))


def given_up(
    refuses: Callable[[int | None, float], bool], *, rows: int, window: int, refusal_s: float = ANSWER_S
) -> dict[int, int]:
    """Send rows in virtual time; return those that are given up, with the number of their attempts.

    `refuses` tells it for a row (None for a control) and a time. All must end within a day.
    """
    engine, unsent = Engine(refuses, refusal_s), deque(range(rows))
    while unsent or engine.ends or engine.retries:
        assert engine.now < 86_400
        has_room = len(engine.ends) < window
        next_end = engine.ends[0][0] if engine.ends else math.inf
        if has_room and engine.retries and engine.retries[0][0] <= (engine.now if unsent else next_end):
            at, _, row = heapq.heappop(engine.retries)
            engine.now = max(at, engine.now)
            engine.send(row)
        elif has_room and unsent:
            engine.send(PendingRow(request(unsent.popleft(), "p")))
        else:
            engine.end_next()
    return engine.given_up


@pytest.mark.parametrize("refusal_s", [0.001, 60.0])
@pytest.mark.parametrize("rows", [1, 3, 30, 3000])
def test_a_row_that_is_always_refused(rows: int, refusal_s: float) -> None:
    """It is given up soon, among others, and where nothing else is left."""
    found = given_up(lambda row, _: row == 0, rows=rows, window=50, refusal_s=refusal_s)
    assert found.keys() == {0}
    assert MAX_ATTEMPTS <= found[0] <= 9


def test_some_rows_that_are_always_refused() -> None:
    """They prove nothing for each other: controls do, where nothing else is left."""
    found = given_up(lambda row, _: row is not None and row % 10 == 0, rows=200, window=50)
    assert found.keys() == set(range(0, 200, 10))
    assert max(found.values()) <= 20


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("rows", "window"), [(5, 5), (200, 10), (3000, 300)])
def test_random_refusals_cost_no_row(rows: int, window: int, share: float) -> None:
    """As of a load balancer with a dead half, however unlucky a row is."""
    for seed in range(20 if rows < 1000 else 3):
        rng = random.Random(seed)
        assert given_up(lambda *_, rng=rng: rng.random() < share, rows=rows, window=window) == {}


@pytest.mark.parametrize("rows", [1, 20, 500, 5000])
def test_an_outage_costs_no_row(rows: int) -> None:
    """In mid-run, and when some rows are left; also when it comes back and goes again."""
    assert given_up(lambda _, now: 1.0 <= now < 200.0, rows=rows, window=50) == {}
    assert given_up(lambda _, now: 0.02 <= now < 100.0, rows=rows, window=50) == {}
    assert given_up(lambda _, now: now < 300.0 and now % 1 < 0.9, rows=rows, window=50) == {}


def test_a_control_asks_for_little() -> None:
    """It is a prompt that was answered, or else the beginning of the one that was refused."""
    record = RouteRecord()
    assert control_for(record, request(3, "refused prompt")).prompt == "r"
    record.last = request(4, "answered prompt")
    control = control_for(record, request(3, "refused prompt"))
    assert (control.prompt, control.sampling["max_new_tokens"]) == ("answered prompt", 8)
    body = RequestBody(EMBEDDINGS_PATH, b'{"input": ["a", "b"]}', "m", 0)
    record.last = request(4, "")._replace(kind="body", prompt=body)
    assert orjson.loads(control_for(record, request(3, "")).prompt.content)["input"] == "1"


def test_the_cause_of_refusals() -> None:
    """A first refusal says nothing; later ones wait for other rows, or need a control where there is none."""
    history, record = FailureHistory(), RouteRecord()

    def refuse(now: float, *, others_in_flight: bool = False) -> RefusalCause:
        refusals = history.record_refusal(record, sent_at=now, now=now)
        return cause_of(refusals, record, others_in_flight=others_in_flight, max_attempts=2)

    assert refuse(1.0) is RefusalCause.OPEN
    assert refuse(2.0, others_in_flight=True) is RefusalCause.NEEDS_CONTROL  # nobody was answered since
    record.record_answer(2.5)
    assert refuse(3.0, others_in_flight=True) is RefusalCause.OPEN
    record.has_control = True
    assert refuse(4.0) is RefusalCause.OPEN
    record.has_control = False
    assert refuse(5.0) is RefusalCause.NEEDS_CONTROL
    assert record.refused == 1  # once for each row
    for _ in range(1000):
        record.record_answer(6.0)
    assert refuse(5.5) is RefusalCause.ROW
