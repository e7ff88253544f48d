"""The dispatcher's loop with servers that answer as a test says: what each row comes to."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    EngineLostError,
    PreemptedError,
    RequestError,
    RowRefusedError,
    UnreachedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import Completion, Outcome, Request
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.dispatcher import Dispatcher
from batchrunner.dispatch.load_control import LoadControl, SendingRun
from batchrunner.dispatch.queue import Backlog, PendingRow
from batchrunner.dispatch.reorder import Reorderer
from batchrunner.dispatch.route import Routes
from batchrunner.dispatch.sharing import Account
from batchrunner.job.spec import LimitsSpec
from tests.support.prompts import request

Server = Callable[[int, int], RequestError | None]
"""Gets a row and the number of times that this server has had it; returns its error, or None to answer."""


def answers(_row: int, _times: int) -> RequestError | None:
    return None


def refuses(_row: int, _times: int) -> RequestError:
    refusal = RowRefusedError("status 400: not this model")
    refusal.body = b"{}"
    return refusal


def fails(_row: int, _times: int) -> RequestError:
    return AttemptFailedError("status 500")


def is_busy(_row: int, _times: int) -> RequestError:
    return EngineBusyError("status 503")


class Events:
    """Writes events into the history of a run."""

    def __init__(self, history: list[str]) -> None:
        self._history = history

    def write(self, event: str, **_: Any) -> None:
        self._history.append(event)


class Run:
    """Rows of a run, the servers that get them, and what they come to."""

    def __init__(self, servers: dict[str, Server], **limits: Any) -> None:
        self.servers = servers
        self.outcomes: dict[int, Outcome] = {}
        self.sent: dict[int, list[str]] = {}
        """Servers that had each row."""
        self.history: list[str] = []
        """URLs of the servers that had a row, and events, in order."""
        events: Any = Events(self.history)
        self.events = events
        info = EngineInfo(kind="test", model="m", max_running=8, routes=tuple(servers))
        self.limits = ConcurrencyLimits(info, QueueBand(), 100, most=8)
        self.limits.begin([], 0.0, unsent=100)
        self.routes = Routes()
        results: Any = self
        engine: Any = None
        self.backlog = Backlog(self.routes, results, lambda: 0)
        self.control = LoadControl(engine, self.limits)
        senders: Any = self
        self.dispatcher = Dispatcher(
            backlog=self.backlog,
            routes=self.routes,
            senders=senders,
            checker=None,
            reorderer=Reorderer(None, None, dedupe=False),
            load_control=self.control,
            events=events,
            limits=LimitsSpec(**limits),
        )

    async def put(self, outcome: Outcome) -> None:
        self.outcomes[outcome.ref.row] = outcome

    def sender_to(self, url: str) -> "Sender":
        return Sender(self, url)

    async def send(self, rows: int) -> None:
        """Send rows until each has an outcome."""
        run, feeder = SendingRun(self.routes, self.backlog, self.events), Feeder(self.backlog, rows)
        self.control.join(run)
        async with asyncio.timeout(60):
            source: Any = feeder
            await self.dispatcher.run(source)

    def errors(self) -> dict[int, str]:
        return {row: outcome.error for row, outcome in self.outcomes.items() if outcome.error is not None}


class Sender:
    """Sends rows to one server of a run."""

    def __init__(self, run: Run, url: str) -> None:
        self._run, self._url = run, url

    async def send(self, sent: Request, *, alone: bool) -> Completion:
        before = self._run.sent.setdefault(sent.ref.row, [])
        before.append(self._url)
        self._run.history.append(self._url)
        await asyncio.sleep(0)
        error = self._run.servers[self._url](sent.ref.row, before.count(self._url))
        if error is not None:
            raise error
        return Completion(["answer"], ["stop"], [1], 1, 0)

    async def close(self) -> None:
        """Nothing is in flight."""


class Feeder:
    """Adds all rows at once."""

    def __init__(self, backlog: Backlog, rows: int) -> None:
        self._backlog, self._rows = backlog, rows

    async def run(self) -> None:
        self._backlog.expect(self._rows)
        for row in range(self._rows):
            self._backlog.add(PendingRow(request(row, "p")))
        self._backlog.finish_reading()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be sent again at once."""
    monkeypatch.setattr(TIMING, "first_retry", 0.001)
    monkeypatch.setattr(TIMING, "longest_retry", 0.002)
    monkeypatch.setattr("batchrunner.dispatch.route.FIRST_COOLDOWN_S", 0.001)
    monkeypatch.setattr("batchrunner.dispatch.route.LONGEST_COOLDOWN_S", 0.002)


def test_runs_of_an_account_have_an_order() -> None:
    """The run of the lowest rank gets the slots, also if it begins later; then the run that began first."""
    account, lab = Account(), Run({"a": answers})
    window = lab.limits.window_of(lab.limits.routes[0])
    runs = {}
    for name, rank in (("second", "2"), ("third", "2"), ("first", "1")):
        routes, results = Routes(account), cast("Any", lab)
        backlog = Backlog(routes, results, lambda: 0)
        backlog.expect(window)
        for row in range(window):
            backlog.add(PendingRow(request(row, "p")))
        runs[name] = SendingRun(routes, backlog, lab.events, rank)
        lab.control.join(runs[name])
    windows = {name: run.routes["a"].window for name, run in runs.items()}
    assert windows == {"first": window, "second": 0, "third": 0}
    lab.control.leave(runs["first"])
    assert [runs[name].routes["a"].window for name in ("second", "third")] == [window, 0]


async def test_each_row_has_one_outcome() -> None:
    run = Run({"a": answers, "b": answers})
    await run.send(50)
    assert sorted(run.outcomes) == [*range(50)]
    assert run.errors() == {}
    assert {outcome.attempts for outcome in run.outcomes.values()} == {1}
    assert Counter(url for urls in run.sent.values() for url in urls).keys() == {"a", "b"}


async def test_a_server_that_refuses_what_another_answers_is_suspended() -> None:
    """No row ends with its refusal, and after a few it gets no more rows."""
    run = Run({"good": answers, "bad": refuses})
    await run.send(200)
    assert run.errors() == {}
    suspended_at = run.history.index("route_out")
    assert run.history[suspended_at + 1 :].count("bad") <= run.routes["bad"].window  # they had a slot before


async def test_a_row_that_two_servers_refuse_has_an_error() -> None:
    """One of them answers other rows: so the row is at fault, and it is sent no third time."""

    def refuses_one(row: int, times: int) -> RequestError | None:
        return refuses(row, times) if row == 3 else None

    run = Run({"a": refuses_one, "b": refuses_one, "c": refuses_one})
    await run.send(100)
    assert run.errors() == {3: "status 400: not this model"}
    assert 2 <= len(run.sent[3]) <= 3
    assert "route_out" not in run.history


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_a_row_that_fails_is_tried_a_few_times(max_attempts: int) -> None:
    def fails_one(row: int, times: int) -> RequestError | None:
        return fails(row, times) if row == 3 else None

    run = Run({"a": fails_one}, max_attempts=max_attempts)
    await run.send(20)
    assert run.errors() == {3: "status 500"}
    assert run.outcomes[3].attempts == max_attempts


async def test_a_busy_server_is_asked_again() -> None:
    """However often it refuses rows before it answers: that is no row's fault."""

    def starts(_row: int, times: int) -> RequestError | None:
        return is_busy(0, 0) if times < 8 else None

    run = Run({"a": starts}, max_attempts=2)
    await run.send(10)
    assert run.errors() == {}
    assert all(2 < outcome.attempts <= 8 for outcome in run.outcomes.values())  # controls come beside them


async def test_an_engine_that_fails_rows_and_refuses_them_meanwhile_is_not_lost() -> None:
    """Failed rows may open a gateway's circuit breaker: the last rows end by their own failures."""

    def opens_the_circuit(_row: int, times: int) -> RequestError:
        if times % 3 != 2:
            return is_busy(0, 0)
        failure = AttemptFailedError("status 500")
        failure.body = b"{}"
        return failure

    run = Run({"a": opens_the_circuit}, max_attempts=3, engine_wait=1e-9)
    await run.send(1)
    assert run.errors() == {0: "status 500"}


@pytest.mark.parametrize(("error", "is_blamed"), [(UnreachedError, False), (EngineDownError, True)])
async def test_a_worker_that_a_gateway_cannot_reach(error: type[EngineDownError], is_blamed: bool) -> None:
    """A gateway that takes its workers in turn may send the same row to it each time, and no other."""

    def is_in_turn(row: int, times: int) -> RequestError | None:
        return error("no connection to the worker") if row == 3 and times < 40 else None

    run = Run({"a": is_in_turn}, max_attempts=2)
    await run.send(200)
    assert [*run.errors()] == [3] * is_blamed


async def test_rows_that_were_returned_do_not_count_the_attempt() -> None:
    def returns(_row: int, times: int) -> RequestError | None:
        if times > 1:
            return None
        returned = PreemptedError("aborted")
        returned.tokens = 7
        return returned

    run = Run({"a": returns})
    await run.send(10)
    assert run.errors() == {}
    assert {outcome.attempts for outcome in run.outcomes.values()} == {1}
    assert (run.limits.returned_rows, run.limits.tokens_lost) == (10, 70)


async def test_a_row_that_kills_the_engine_is_given_up() -> None:
    """The rows beside it are not blamed."""

    def dies(row: int, _times: int) -> RequestError | None:
        return EngineDiedError("connection lost") if row == 3 else None

    run = Run({"a": dies})
    await run.send(20)
    assert run.errors() == {3: "the engine died 4 times while it had this row: connection lost"}


async def test_an_engine_that_takes_no_row_is_lost() -> None:
    """The run ends, and no row is blamed: another start sends them again."""
    run = Run({"a": is_busy}, engine_wait=0.05)
    with pytest.raises(
        EngineLostError, match=r"accepted no row for .* \(row \d+ and \d+ more wait\): status 503"
    ):
        await run.send(10)
    assert run.outcomes == {}
