"""Rows that are always refused are given up; those that are refused by chance, or in an outage, are not."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable

import orjson
import pytest

from batchrunner.core.errors import EngineBusyError
from batchrunner.core.retry import pause_before_retry
from batchrunner.core.types import EMBEDDINGS_PATH, RequestBody
from batchrunner.dispatch.blame import RouteRecord, is_why
from batchrunner.dispatch.queue import PendingRow
from tests.support.prompts import request

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
            self.record.newest = max(self.record.newest, sent_at)
            self.record.answered += row is None or row.attempts == 1
        elif row is None:
            self.record.refused += 1
        else:
            self.refused(row)
        self.record.has_control = self.record.has_control and row is not None

    def refused(self, row: PendingRow) -> None:
        """Give a row up, or send it again later."""
        is_new = row.refusals is None
        answers = self.record.count(row, self.now)
        if is_why(row, MAX_ATTEMPTS):
            self.given_up[row.request.ref.row] = row.attempts
            return
        if not (is_new or self.record.has_control or (answers and self.ends)):
            self.record.has_control = True
            self.send(None)
        pause_s = pause_before_retry(
            EngineBusyError("503"), tries=row.attempts, failures=0, max_attempts=1, jitter=self.rng.random()
        )
        assert pause_s is not None
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
    assert record.control_for(request(3, "refused prompt")).prompt == "r"
    record.last = request(4, "answered prompt")
    control = record.control_for(request(3, "refused prompt"))
    assert (control.prompt, control.sampling["max_new_tokens"]) == ("answered prompt", 8)
    body = RequestBody(EMBEDDINGS_PATH, b'{"input": ["a", "b"]}', "m", 0)
    record.last = request(4, "")._replace(kind="body", prompt=body)
    assert orjson.loads(record.control_for(request(3, "")).prompt.content)["input"] == "1"
