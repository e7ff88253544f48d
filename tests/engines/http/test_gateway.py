"""Answers of a Model Gateway, as smg 1.13.0 gave them: refusals, lists of workers, loads, keys."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDiedError,
    EngineDownError,
    RowRefusedError,
    UnreachedError,
)
from batchrunner.core.timing import TIMING
from batchrunner.core.types import CHAT_PATH, RequestBody
from batchrunner.engines.hang_detector import HangDetector
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.http.gateway import (
    CONFIRMATIONS,
    ROUTED_TO,
    ThroughGateway,
    code_of,
    reason_to_go_through,
    refusal_of,
)
from batchrunner.engines.http.gateway_workers import GatewayQuestions
from batchrunner.engines.http.replies import WholeAnswer
from batchrunner.engines.http.server_info import is_gateway
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.spec import LimitsSpec
from tests.support.fake_sglang import FakeSGLang
from tests.support.prompts import request
from tests.support.server_thread import serving

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
        (refused(503, "no_available_workers"), UnreachedError),
        (refused(404, "model_not_found", "invalid_request_error"), UnreachedError),
        (refused(500, "call_upstream_connection_failed"), UnreachedError),
        (refused(502, "PD disaggregation request failed"), UnreachedError),
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
        self.held: str | None = None
        """Worker that hangs until it `resumes`."""
        self.hangs, self.resumes = asyncio.Event(), asyncio.Event()
        self.down: str | None = None
        """Worker that is listed, and does not answer."""
        self.asked = 0
        self.key_header = "x-smg-routing-key"
        self.headers: set[str | None] = set()
        """Values of the header of the tenant."""
        self.sent: list[tuple[str | None, dict[str, Any]]] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:  # noqa: PLR0911 - one for each path
        self.headers.add(request.headers.get("x-smg-tenant-id"))
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
                key = request.headers.get(self.key_header)
                self.asked += 1
                chosen = sum(key.encode()) if self.keeps and key else self.asked
                worker = self.workers[chosen % len(self.workers)]["url"]
                headers = {"x-smg-routed-worker-id": worker}
                if worker == self.held:
                    self.hangs.set()
                    await self.resumes.wait()
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
async def opened(gateway: FakeGateway) -> AsyncIterator[ThroughGateway]:
    async with serving(gateway.answer) as url:
        spec = GatewayEngine(kind="gateway", url=url)
        engine = ThroughGateway(spec, why="a test", api_key=None, limits=LimitsSpec())
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


async def test_a_worker_that_hangs() -> None:
    """Its rows are sent again, and it gets no rows until a load report shows progress."""
    gateway = FakeGateway()
    for worker in gateway.workers:
        worker["engine_load"] = {"timestamp": "1", "loads": [{"num_running_reqs": 1, "num_used_tokens": 100}]}
    async with opened(gateway) as engine:
        await engine.open()
        hanging, other = (worker["url"] for worker in gateway.workers)
        gateway.held = hanging
        engine.endpoints[hanging].hang_detector = HangDetector(0.0)
        row = asyncio.create_task(engine.generate(request(0, "a"), hanging))
        await gateway.hangs.wait()
        for _ in range(3):
            await engine.loads()
        for call in (row, engine.generate(request(0, "a"), hanging)):
            with pytest.raises(EngineDownError, match="did nothing for"):
                await call
        assert (await engine.generate(request(0, "a"), other)).texts
        assert [incident.what for incident in engine.incidents()] == ["hangs"]
        gateway.held = None
        gateway.resumes.set()
        gateway.workers[0]["engine_load"]["loads"][0]["num_used_tokens"] = 200
        await engine.loads()
        assert (await engine.generate(request(0, "a"), hanging)).texts


async def test_headers_of_the_job() -> None:
    """All requests have the job's headers, and the routing key has the name that the gateway reads."""
    gateway = FakeGateway()
    gateway.key_header = "x-session"
    async with serving(gateway.answer) as url:
        spec = GatewayEngine(
            kind="gateway", url=url, routing_key_header="x-session", headers={"x-smg-tenant-id": "nightly"}
        )
        engine = ThroughGateway(spec, why="a test", api_key=None, limits=LimitsSpec())
        try:
            info = await engine.open()
            assert set(info.routes) == {worker["url"] for worker in gateway.workers}
            await engine.generate(request(0, "a"), info.routes[0])
            assert gateway.sent[-1][0] == info.routes[0]
            assert await engine.loads()
        finally:
            await engine.close()
    assert gateway.headers == {"nightly"}


async def test_keys_are_found_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for routing keys reaches a gateway that only the proxy of the environment reaches."""
    gateway = FakeGateway()
    async with serving(gateway.answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        spec = GatewayEngine(kind="gateway", url="http://gateway.invalid:30000")
        engine = ThroughGateway(spec, why="a test", api_key=None, limits=LimitsSpec())
        try:
            info = await engine.open()
        finally:
            await engine.close()
    assert set(info.routes) == {worker["url"] for worker in gateway.workers}


async def test_a_worker_that_is_down_does_not_decide_the_way() -> None:
    """Rows go directly if all healthy workers can be reached, although one that is down cannot."""
    gateway = FakeGateway()
    up, down = gateway.workers
    with FakeSGLang() as worker:
        up.update(url=worker.url, labels={})
        async with serving(gateway.answer) as url:
            spec = GatewayEngine(kind="gateway", url=url)
            down.update(url=f"http://127.0.0.1:{free_port()}", labels={})
            assert "cannot be reached" in str(await reason_to_go_through(spec, {}))
            down.update(is_healthy=False, status="failed")
            assert await reason_to_go_through(spec, {}) is None


async def test_a_worker_that_is_down_as_the_run_starts() -> None:
    """The gateway's refusal for it does not count as the refusal of a gateway that reads requests."""
    gateway = FakeGateway()
    gateway.down = gateway.workers[sum(b"any") % 2]["url"]
    async with opened(gateway) as engine:
        info = await engine.open()
    assert (info.unsupported_elsewhere, info.chat_limits) == ({}, {})


async def test_one_route_where_no_key_is_kept() -> None:
    """A gateway that takes its workers in turn is one route with a scheduler for each worker."""
    gateway = FakeGateway(keeps=False)
    async with opened(gateway) as engine:
        info = await engine.open()
        assert info.routes == (engine.url,)
        loads = await engine.loads()
        assert [load.route for load in loads] == [engine.url] * 2
        assert {load.scheduler.rpartition("#")[2] for load in loads} == {w["url"] for w in gateway.workers}


async def test_a_gateway_without_keys_whose_first_worker_was_alone() -> None:
    """The route of its first worker becomes that of all workers, also when the first one is gone."""
    gateway = FakeGateway(keeps=False)
    first, second = gateway.workers
    third = {**second, "url": "http://10.0.0.3:30000"}
    gateway.workers = [first]
    async with opened(gateway) as engine:
        info = await engine.open()
        assert info.routes == (first["url"],)
        assert not any("routing key" in note for note in info.notes)
        gateway.workers = [second, third]
        while len(loads := await engine.loads()) < 2:
            pass
        assert {load.route for load in loads} == {first["url"]}
        answered_by = set()
        for _ in range(2):
            assert (await engine.generate(request(0, "a"), first["url"])).texts == ["a"]
            answered_by.add(gateway.sent[-1][0])
        assert answered_by == {second["url"], third["url"]}


async def test_the_load_of_prefill_and_decode() -> None:
    """A row that waits for its prefill is listed as waiting by both workers, and counts once."""
    gateway = FakeGateway()
    reports = {
        # Of 44 requests, 10 wait for their prefill, 22 for their KV cache, and 9 for a place in a batch.
        "prefill": {"num_waiting_reqs": 10, "token_usage": 0.9, "queues": {"waiting": 2}},
        "decode": {
            "num_running_reqs": 3, "num_waiting_reqs": 41, "token_usage": 0.1, "queues": {"waiting": 9},
            "max_running_requests": 32,
        },
    }  # fmt: skip
    for worker, (kind, report) in zip(gateway.workers, reports.items(), strict=True):
        worker |= {"worker_type": kind, "load": 44, "engine_load": {"timestamp": "1", "loads": [report]}}
    async with opened(gateway) as engine:
        info = await engine.open()
        (load,) = await engine.loads()
        assert info.routes == (load.route,) == (engine.url,)
        assert (load.running, load.queue, load.token_usage, load.max_running) == (25, 19, 0.1, 32)


async def test_reports_of_prefill_and_decode_that_cannot_be_read() -> None:
    """The last reports that the gateway could read count further, as for regular workers."""
    gateway = FakeGateway()
    for worker, kind in zip(gateway.workers, ("prefill", "decode"), strict=True):
        report = {"num_running_reqs": 9, "token_usage": 0.5}
        worker |= {"worker_type": kind, "engine_load": {"timestamp": "1", "loads": [report]}}
    async with opened(gateway) as engine:
        await engine.open()
        (load_before,) = await engine.loads()
        for worker in gateway.workers:
            worker["engine_load"] = None
        (load,) = await engine.loads()
        assert replace(load, taken_at=load_before.taken_at) == load_before
        assert load.token_usage == 0.5


async def test_several_completions_of_a_row_of_a_batch_file() -> None:
    """Prefill and decode workers never answer such a row, so that it is refused before it is sent."""
    gateway = FakeGateway()
    for worker, kind in zip(gateway.workers, ("prefill", "decode"), strict=True):
        worker["worker_type"] = kind
    async with opened(gateway) as engine:
        info = await engine.open()
        assert "several completions" in info.unsupported["sampling.n"]
        body = RequestBody(CHAT_PATH, b'{"messages": [], "n": 2}', "m", 0)
        row = request(0, "")._replace(kind="body", prompt=body, sampling={})
        with pytest.raises(RowRefusedError, match="n: with prefill and decode apart"):
            await engine.generate(row, info.routes[0])
        assert not gateway.sent


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        (b'{"messages": [], "logit_bias": {"5": 1}}', "m", "logit_bias: the gateway's workers speak gRPC"),
        (b'{"messages": [], "lora_path": "a"}', "m", "lora_path: the gateway's workers speak gRPC"),
        (b'{"messages": []}', "m:a", "model 'm:a': the gateway's workers speak gRPC"),
        (b'{"messages": [], "logit_bias": null}', "m", None),
    ],
)
async def test_workers_that_speak_grpc(body: bytes, model: str, reason: str | None) -> None:
    """A request of a batch file is not sent if the gateway would drop a part of it; nor files of a text."""
    gateway = FakeGateway()
    for worker in gateway.workers:
        worker["connection_mode"] = "grpc"
    async with opened(gateway) as engine:
        info = await engine.open()
        assert "drops the files" in info.unsupported_elsewhere["prompt.images"]
        assert "prompt.images" not in info.unsupported_in_chats
        prompt = RequestBody(CHAT_PATH, body, model, 0)
        row = request(0, "")._replace(kind="body", prompt=prompt, sampling={})
        if reason is None:
            engine._refuse_unsendable(row)
            return
        with pytest.raises(RowRefusedError, match=reason):
            await engine.generate(row, info.routes[0])
        assert not gateway.sent


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


class HoldsLastConfirmation(FakeGateway):
    """A gateway that holds the answer which confirms the routing key of one worker for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.slow_worker: str | None = None
        self.holds, self.goes_on = asyncio.Event(), asyncio.Event()
        self.asked_with = Counter[str | None]()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        response = await super().answer(request)
        key = request.headers.get(self.key_header)
        self.asked_with[key] += 1
        is_last = self.asked_with[key] == 1 + CONFIRMATIONS
        if is_last and response.headers.get(ROUTED_TO) == self.slow_worker:
            self.holds.set()
            await self.goes_on.wait()
        return response


async def test_a_worker_that_leaves_during_a_search_for_keys() -> None:
    """A worker that the gateway stops using while its key is searched gets no rows after the search."""
    gateway = HoldsLastConfirmation()
    first, second = gateway.workers
    async with opened(gateway) as engine:
        await engine.open()
        gateway.slow_worker = second["url"]
        gateway.workers.append({**first, "url": "http://10.0.0.3:30000"})
        await engine.loads()
        await gateway.holds.wait()
        second["is_healthy"] = False
        await engine.loads()
        gateway.goes_on.set()
        while len(await engine.loads()) < 2:
            pass
        with pytest.raises(EngineDownError, match=f"the gateway sends no rows to {second['url']} now"):
            await engine.generate(request(0, "a"), second["url"])


async def test_a_key_that_may_not_list_the_workers() -> None:
    """Then the workers and their loads are those of `/loads`."""
    gateway = FakeGateway(lists=False)
    async with opened(gateway) as engine:
        info = await engine.open()
        assert set(info.routes) == {worker["url"] for worker in gateway.workers}
        assert (await engine.generate(request(0, "a"), info.routes[0])).texts == ["a"]
        assert len(await engine.loads()) == 2


async def test_a_gateway_that_is_away_for_a_key_that_may_not_list_the_workers() -> None:
    """The reason is the lost connection, and not that the server is no gateway."""
    gateway = FakeGateway(lists=False)
    async with aiohttp.ClientSession() as session:
        async with serving(gateway.answer) as url:
            questions = GatewayQuestions(session, url)
            assert len(await questions.workers()) == 2
        with pytest.raises(EngineDownError, match="no connection to"):
            await questions.workers()


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
    async with serving(gateway.answer) as url, aiohttp.ClientSession() as session:
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
