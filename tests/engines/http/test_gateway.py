"""Answers of a Model Gateway, as smg 1.13.0 gave them: refusals, lists of workers, loads, keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
from aiohttp import web

from batchrunner.core.errors import (
    AnotherModelError,
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    RowRefusedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.engines.http.gateway import ThroughGateway, code_of, refusal_of
from batchrunner.engines.http.gateway_workers import (
    GatewayQuestions,
    GatewayWorker,
    LoadEstimate,
    WorkerLoad,
    WorkerWatch,
)
from batchrunner.engines.http.replies import WholeAnswer
from batchrunner.engines.http.server_info import is_gateway
from batchrunner.job.spec import LimitsSpec
from tests.support.prompts import request

WORKER = "http://10.0.0.1:30000"


def refused(status: int, code: str | int, kind: str = "server_error") -> WholeAnswer:
    error = {"type": kind, "code": code, "message": "it says why", "param": None}
    return WholeAnswer(status, orjson.dumps({"error": error}), retry_after="2")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refused(429, "admission_queue_full", "rate_limit_error"), EngineBusyError),
        (refused(503, "admission_queue_timeout"), EngineBusyError),
        (refused(503, "worker_overload_protection_shed"), EngineBusyError),
        (refused(429, "tenant_rate_limit_exceeded"), EngineBusyError),
        (refused(503, "no_available_workers"), EngineDownError),
        (refused(404, "model_not_found", "invalid_request_error"), EngineDownError),
        (refused(500, "call_upstream_connection_failed"), EngineDownError),
        (refused(502, "call_upstream_request_failed"), EngineDiedError),
        (refused(504, "request_timeout"), AttemptFailedError),
        (refused(500, "call_upstream_timeout"), AttemptFailedError),
        (refused(400, "context_length_exceeded"), None),
        (refused(400, 400, "BadRequestError"), None),
        (WholeAnswer(503, b'{"error": {"message": "The request queue is full."}}'), None),
        (WholeAnswer(500, b"<html>"), None),
    ],
)
def test_the_gateways_refusals(answer: WholeAnswer, error: type[Exception] | None) -> None:
    """Its limits are a congestion, and missing workers an absence, even with 404; else the worker refused."""
    found = refusal_of(answer)
    assert type(found) is (error or type(None))
    if isinstance(found, EngineBusyError):
        assert "the gateway: " in str(found)
        assert found.retry_after_s in {2.0, None}


def test_codes_of_other_bodies() -> None:
    """A worker's codes are numbers, and no body is an error of its own."""
    for body in (b"", b"null", b"[]", b'{"error": "text"}', b'{"error": {"code": 400}}', b"\xff"):
        assert code_of(body) is None


def reported(
    running: int, waiting: int, *, usage: float = 0.5, most: int | None = 64, at: str = ""
) -> WorkerLoad:
    return WorkerLoad(
        num_running_reqs=running, num_waiting_reqs=waiting, token_usage=usage, max_running_requests=most,
        reported_at=at,
    )  # fmt: skip


def running_and_queue(estimate: LoadEstimate, in_flight: int) -> tuple[int, int]:
    load = estimate.now(in_flight, scheduler="s", route="r", now=7.0)
    assert load.taken_at == 7.0
    return load.running, load.queue


@pytest.mark.parametrize(
    ("report", "in_flight", "load"),
    [
        (reported(32, 68, usage=0.9), 100, (32, 68)),  # the pool is full
        (reported(8, 28), 36, (36, 0)),  # it was between two batches
        (reported(10, 0), 100, (64, 36)),  # it had not been sent more
        (reported(10, 0, most=None), 100, (100, 0)),
        (reported(64, 200), 100, (64, 200)),  # most requests came through another gateway
    ],
)
def test_the_load_at_a_first_report(report: WorkerLoad, in_flight: int, load: tuple[int, int]) -> None:
    """As many requests run as the pool or the limit allows, and the others wait."""
    estimate = LoadEstimate()
    estimate.observe(report, in_flight)
    assert running_and_queue(estimate, in_flight) == load


def test_the_queue_between_two_reports() -> None:
    """Requests on their way do not count as queued, and the queue follows the requests in flight."""
    estimate = LoadEstimate()
    estimate.observe(reported(0, 0), 0)
    assert running_and_queue(estimate, 100) == (64, 36)
    second = reported(64, 6, at="12:00:01")  # 30 of 100 are on their way
    estimate.observe(second, 100)
    assert running_and_queue(estimate, 100) == (64, 6)
    estimate.observe(second, 160)  # still the old report
    assert running_and_queue(estimate, 160) == (64, 66)
    assert running_and_queue(estimate, 80) == (64, 0)
    estimate.observe(reported(64, 60, at="12:00:02"), 140)
    assert running_and_queue(estimate, 140) == (64, 60)
    estimate.observe(reported(50, 0, at="12:00:03"), 110)  # even the limit starves the scheduler
    assert running_and_queue(estimate, 120) == (64, 10)


def listed(weights_gb: float | None, at: str) -> GatewayWorker:
    loads = [] if weights_gb is None else [{"memory": {"weight_gb": weights_gb}}]
    entry = {"url": WORKER, "engine_load": {"timestamp": at, "loads": loads}}
    return msgspec.convert(entry, GatewayWorker)


def test_a_worker_is_in_doubt_until_a_newer_report() -> None:
    """The report in the gateway's list when a row failed may be older than the failure."""
    watch = WorkerWatch(WORKER)
    watch.record_failure()
    assert not watch.in_doubt  # no report has told the weights
    watch.observe(listed(15.0, "1"))
    watch.record_failure()
    in_doubt = []
    for at, weights_gb in [("2", 15.1), ("2", 15.1), ("3", 15.1), ("4", 14.9), ("", None), ("5", 15.0)]:
        watch.observe(listed(weights_gb, at))
        in_doubt.append(watch.in_doubt)
    assert in_doubt == [True, True, False, False, False, False]
    watch.record_failure()
    watch.observe(listed(None, ""))  # the gateway could not read a report after the failure
    watch.observe(listed(15.0, "6"))
    assert not watch.in_doubt
    with pytest.raises(AnotherModelError, match=r"the memory of the weights in GB was '15.0' and is '20.0'"):
        watch.observe(listed(20.0, "7"))


class FakeGateway:
    """A gateway whose list of workers is for some keys only; each key leads to one of two workers."""

    def __init__(self, *, lists: bool = True, keeps: bool = True) -> None:
        self.lists, self.keeps = lists, keeps
        self.workers: list[Any] = [
            {
                "url": f"http://10.0.0.{n}:30000", "model_id": "m", "status": "ready", "is_healthy": True,
                "labels": {"model_path": "m", "max_running_requests": "32"}, "load": n,
            }
            for n in (1, 2)
        ]  # fmt: skip
        self.down: str | None = None
        """Worker that is listed, and does not answer."""
        self.asked = 0
        self.sent: list[tuple[str | None, dict[str, Any]]] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:  # noqa: PLR0911 - one for each path
        match request.path:
            case "/workers" if self.lists:
                return web.json_response({"workers": self.workers})
            case "/workers":
                return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)
            case "/loads":
                loads = [
                    {"worker": worker["url"], "worker_type": "regular", "num_running_reqs": 3}
                    for worker in self.workers
                ]
                return web.json_response({"version": "smg-1.13.0", "loads": loads})
            case "/get_model_info":
                return web.json_response({"model_path": "m", "served_model_name": "m"})
            case "/generate":
                body = await request.json()
                key = request.headers.get("x-smg-routing-key")
                self.asked += 1
                chosen = key if self.keeps and key else str(self.asked)
                worker = self.workers[sum(chosen.encode()) % len(self.workers)]["url"]
                headers = {"x-smg-routed-worker-id": worker}
                if worker == self.down:
                    error = {"code": "call_upstream_connection_failed", "message": "refused"}
                    return web.json_response({"error": error}, status=500)
                if body.get("sampling_params", {}).get("temperature") == -1 or not body:
                    return web.json_response({"error": {"message": "no"}}, status=400, headers=headers)
                self.sent.append((worker, body))
                meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}
                return web.json_response({"text": "a", "meta_info": meta}, headers=headers)
        return web.json_response({}, status=404)


@asynccontextmanager
async def serving(gateway: FakeGateway) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(gateway.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def opened(gateway: FakeGateway) -> AsyncIterator[ThroughGateway]:
    async with serving(gateway) as url:
        engine = ThroughGateway(url, why="a test", api_key=None, limits=LimitsSpec())
        try:
            yield engine
        finally:
            await engine.close()


async def test_a_route_for_each_worker() -> None:
    """Where keys lead to one worker, each worker is a route, and rows name the model."""
    gateway = FakeGateway()
    async with opened(gateway) as engine:
        info = await engine.open()
        assert set(info.routes) == {worker["url"] for worker in gateway.workers}
        assert info.max_running == 64
        for route in info.routes * 3:
            assert (await engine.generate(request(0, "a"), route)).texts == ["a"]
            assert gateway.sent[-1][0] == route
            assert gateway.sent[-1][1]["model"] == "m"
        loads = {load.route: load for load in await engine.loads()}
        assert {route: load.running for route, load in loads.items()} == {
            worker["url"]: worker["load"] for worker in gateway.workers
        }


async def test_one_route_where_no_key_is_kept() -> None:
    """A gateway that takes its workers in turn is one route with a scheduler for each worker."""
    gateway = FakeGateway(keeps=False)
    async with opened(gateway) as engine:
        info = await engine.open()
        assert info.routes == (engine.url,)
        loads = await engine.loads()
        assert [load.route for load in loads] == [engine.url] * 2
        assert {load.scheduler.rpartition("#")[2] for load in loads} == {w["url"] for w in gateway.workers}


async def test_a_worker_that_is_down_gets_a_key_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers have routes meanwhile."""
    monkeypatch.setattr(TIMING, "model_check", 0.001)
    gateway = FakeGateway()
    up, gateway.down = (worker["url"] for worker in gateway.workers)
    async with opened(gateway) as engine:
        info = await engine.open()
        assert info.routes == (up,)
        assert [load.route for load in await engine.loads()] == [up]
        down, gateway.down = gateway.down, None
        while len(await engine.loads()) < 2:
            pass
        assert (await engine.generate(request(0, "a"), down)).texts == ["a"]
        assert gateway.sent[-1][0] == down


async def test_a_key_that_may_not_list_the_workers() -> None:
    """Then the workers and their loads are those of `/loads`."""
    gateway = FakeGateway(lists=False)
    async with opened(gateway) as engine:
        info = await engine.open()
        assert set(info.routes) == {worker["url"] for worker in gateway.workers}
        assert (await engine.generate(request(0, "a"), info.routes[0])).texts == ["a"]
        assert len(await engine.loads()) == 2


async def test_a_worker_of_another_name_gets_no_rows() -> None:
    """A gateway may serve several models: the workers of others are none of the run's."""
    gateway = FakeGateway()
    async with opened(gateway) as engine:
        await engine.open()
        gateway.workers.append({**gateway.workers[0], "url": "http://10.0.0.3:30000", "model_id": "other"})
        assert {load.route for load in await engine.loads()} == {w["url"] for w in gateway.workers[:2]}


async def test_odd_lists() -> None:
    """What is no worker is left out; what is no list is no gateway."""
    gateway = FakeGateway()
    gateway.workers += [None, 7, {}, {"url": 3}, {"url": "http://a", "load": "many"}]
    async with serving(gateway) as url, aiohttp.ClientSession() as session:
        assert len(await GatewayQuestions(session, url).workers()) == 2
        assert await is_gateway(url, {})
        assert not await is_gateway(f"{url}/nothing", {})
        with pytest.raises(EngineDownError, match="is not SGLang's Model Gateway"):
            await GatewayQuestions(session, f"{url}/nothing").workers()


async def test_a_row_that_a_worker_refuses() -> None:
    """A worker's own refusal is the row's, as without a gateway."""
    gateway = FakeGateway()
    async with opened(gateway) as engine:
        info = await engine.open()
        with pytest.raises(RowRefusedError, match="400: no"):
            await engine.generate(request(0, "a")._replace(sampling={"temperature": -1}), info.routes[0])
