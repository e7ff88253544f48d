"""Replicas behind the real Model Gateway: fake ones for what goes wrong, real ones for what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pyarrow as pa
import pytest

import batchrunner
from batchrunner.core.types import Request, RowRef
from batchrunner.engines.http import wire
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.http.server_info import WorkerList
from batchrunner.engines.launched.fleet import GatewayProcess
from batchrunner.job.engine import GatewayEngine
from batchrunner.job.sampling import SamplingSpec
from batchrunner.job.spec import LimitsSpec
from tests.conftest import (
    eventually,
    job_of,
    results_of,
    rows_in,
    run_job,
    write_rows,
)
from tests.support.answers import vector_for
from tests.support.engine_processes import descendants_of
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

KEY_VARIABLE = "SGLANG_API_KEY"

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _quiet_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway asks every worker by HTTP/2 too, which the fake's library logs as an error."""
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)


class RealGateway:
    """The real gateway in a process of its own, with whatever workers a test gives it."""

    def __init__(self, log_dir: Path, **arguments: Any) -> None:
        self.key = secrets.token_hex(8)
        spec = GatewayEngine(kind="gateway", model="of/fakes", gateway_args=arguments)
        limits = LimitsSpec(request_timeout=60)
        self.process = GatewayProcess(spec, [], key=self.key, log_dir=log_dir, limits=limits)
        self.url = self.process.url

    async def use(self, *urls: str) -> None:
        workers = WorkerList(self.url, self.key)
        try:
            assert await workers.bring_to(set(urls))
        finally:
            await workers.close()


@pytest.fixture(scope="module")
def loop_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def real_gateway(
    tmp_path_factory: pytest.TempPathFactory, loop_runner: asyncio.Runner
) -> Iterator[RealGateway]:
    made = RealGateway(tmp_path_factory.mktemp("gateway"))
    loop_runner.run(made.process.start())
    try:
        yield made
    finally:
        loop_runner.run(made.process.close())


Workers = tuple[dict[str, Any], FakeSGLang, FakeSGLang]
"""The engine of a job, and the two workers behind its gateway."""


@pytest.fixture
def behind(
    real_gateway: RealGateway, loop_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., contextlib.AbstractContextManager[Workers]]]:
    """Put two workers behind the gateway, the second one at a port."""
    monkeypatch.setenv(KEY_VARIABLE, real_gateway.key)

    @contextlib.contextmanager
    def put(port: int = 0, **arguments: Any) -> Iterator[Workers]:
        with (
            FakeSGLang(api_key=real_gateway.key, arguments=arguments) as one,
            FakeSGLang(api_key=real_gateway.key, arguments=arguments, port=port) as two,
        ):
            loop_runner.run(real_gateway.use(one.url, two.url))
            yield {"kind": "gateway", "url": real_gateway.url}, one, two

    yield put
    loop_runner.run(real_gateway.use())


def hold_until(workers: Sequence[FakeSGLang], holds: Callable[[], bool]) -> None:
    """Let workers answer from the moment on at which this holds for what they have got."""

    def script(_: Sent) -> Behaviour:
        if holds():
            for worker in workers:
                worker.answer_held()
        return "hold"

    for worker in workers:
        worker.script = script


@pytest.mark.gateway
@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_rows_are_shared_out(tmp_path: Path, behind: Any, prompt: dict[str, str]) -> None:
    """A job on a gateway that runs already: all rows, evenly, and the load of each worker from itself."""
    with behind() as (engine, one, two):
        hold_until((one, two), lambda: len(one.sent) + len(two.sent) >= 40)
        job = job_of(tmp_path, engine, rows=60, prompt=prompt, window=40)
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 60, 0)
    assert [row["output"] for row in results_of(job)] == [f"answer 0 to row {i}" for i in range(60)]
    assert min(len(one.sent), len(two.sent)) >= 20
    assert report.engine["kind"] == "gateway"
    assert report.engine["model"] == "fake/model"
    assert (report.engine["max_running"], report.engine["routes"]) == (16, ("gateway",))
    assert any("2 workers behind the gateway" in note for note in report.engine["notes"])


@pytest.mark.gateway
@pytest.mark.usefixtures("full_requests")
def test_embeddings_go_in_lists(tmp_path: Path, behind: Any) -> None:
    """The gateway passes on lists of prompts for embeddings."""
    with behind(is_generation=False) as (engine, one, two):
        ids = [[n, n + 1, 7] for n in range(40)]
        path = write_rows(tmp_path / "ids.parquet", 40, ids=ids)
        job = job_of(
            tmp_path, engine, task="embed", input={"path": str(path)}, prompt={"input_ids": "ids"}, bundle=8,
            window=32,
        )  # fmt: skip
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok) == (0, 40)
        assert report.bundles["most_rows"] > 1
        assert [row["embedding"] for row in results_of(job)] == [vector_for(str(each)) for each in ids]
        assert sum(sent.path == "/v1/embeddings" for fake in (one, two) for sent in fake.sent) == 40


@pytest.mark.gateway
@pytest.mark.usefixtures("full_requests")
def test_scores_go_in_lists(tmp_path: Path, behind: Any) -> None:
    """The gateway passes on lists of prompts whose probabilities are asked for."""
    with behind() as (engine, one, two):
        one.tokenize = two.tokenize = lambda body: [7 + len(body["prompt"])]
        changes = {"task": "score", "labels": [" yes", " no"], "prompt": {"text": "text"}, "bundle": 8}
        job = job_of(tmp_path, engine, rows=40, window=32, **changes)
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok) == (0, 40)
        assert report.bundles["most_rows"] > 1
        assert {len(row["scores"]) for row in results_of(job)} == {2}
        assert sum(sent.path == "/generate" for fake in (one, two) for sent in fake.sent) == 40


def bundled_job(directory: Path, engine: Any, ids: list[list[int]], **changes: Any) -> dict[str, Any]:
    """Return a job of token ids with 8 rows in a request; by row, `tokens` are the most of its output."""
    tokens = [16 + row // 12 % 2 for row in range(len(ids))]
    path = write_rows(directory / "ids.parquet", len(ids), ids=ids, tokens=tokens)
    return job_of(
        directory,
        engine,
        **{
            "input": {"path": str(path)},
            "prompt": {"input_ids": "ids"},
            "window": 64,
            "bundle": 8,
            "sampling": {"max_new_tokens": 16},
            **changes,
        },
    )


@pytest.mark.gateway
@pytest.mark.usefixtures("full_requests")
def test_rows_of_a_request_have_one_prefix(tmp_path: Path, behind: Any) -> None:
    """A request goes to one worker whole; each of its rows has its own parameters."""
    ids = [[document] * 300 + [row] for row in range(240) for document in [row % 12]]
    mixed: list[dict[str, Any]] = []

    def note(body: dict[str, Any]) -> Literal["rows"]:
        if isinstance(body["sampling_params"], list):
            mixed.append(body)
        return "rows"

    with behind() as (engine, one, two):
        one.bundles = two.bundles = note
        job = bundled_job(tmp_path, engine, ids, sampling={"max_new_tokens": {"column": "tokens"}})
        report = batchrunner.run(job)
        at = [{sent.body["input_ids"][0] for sent in worker.sent} for worker in (one, two)]
        sent = [*one.sent, *two.sent]
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 240, 0)
    assert [row["output"] for row in results_of(job)] == [f"answer 0 to {row}" for row in ids]
    assert report.bundles["most_rows"] > 1
    assert report.bundles["rows_resent"] == 0
    assert at[0] | at[1] == set(range(12))
    assert at[0].isdisjoint(at[1])
    assert mixed
    # 1 is that of rows that compute a prefix beforehand
    assert {each.body["sampling_params"]["max_new_tokens"] for each in sent} - {1} == {16, 17}


@pytest.mark.gateway
@pytest.mark.usefixtures("full_requests")
@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("fate", ["die", "disconnect"])
def test_a_worker_that_cuts_off_a_request_with_several_rows(
    tmp_path: Path, behind: Any, fate: Behaviour
) -> None:
    """Rows that had ended keep their answers, and the others are sent again."""
    with behind() as (engine, one, two):
        struck: list[Sent] = []

        def once(sent: Sent) -> Behaviour:
            if sent.prompt == "[40]" and not struck:
                struck.append(sent)
                return fate
            return "answer"

        one.script = two.script = once
        job = bundled_job(tmp_path, engine, [[row] for row in range(200)])
        report = batchrunner.run(job)
        tries = Counter(sent.prompt for worker in (one, two) for sent in worker.sent)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert rows_in(job) == list(range(200))
    assert tries["[40]"] > 1
    assert sum(tries.values()) < 300


@pytest.mark.gateway
@pytest.mark.usefixtures("quick_retries")
def test_worker_that_goes_and_comes_back(tmp_path: Path, real_gateway: RealGateway, behind: Any) -> None:
    """No row is lost or doubled, and none uses up its tries while the gateway still sends it there."""
    with contextlib.ExitStack() as stack:
        engine, one, two = stack.enter_context(behind(port=free_port()))
        back: list[FakeSGLang] = []

        def end_at(sent: Sent) -> Any:
            return "die" if len(two.sent) == 20 else "answer"

        def come_back(_: Sent) -> Any:
            if len(one.sent) == 100 and not back:
                back.append(stack.enter_context(FakeSGLang(api_key=real_gateway.key, port=two.port)))
            waits = back and len(back[0].sent) <= 50  # for the other one to get its share
            return "hold" if waits and len(one.sent) < 105 else "answer"

        two.script, one.script = end_at, come_back
        one.on_poll = one.wake_held
        # two tries, for a row that is refused just before and asked about just after the worker is back
        job = job_of(tmp_path, engine, rows=400, limits={"max_attempts": 2}, window=8)
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 400, 0)
        assert report.retries > 0
        assert rows_in(job) == list(range(400))
        assert back
        assert len(back[0].sent) > 50


@pytest.mark.gateway
@pytest.mark.usefixtures("quick_retries")
def test_row_that_a_living_worker_always_cuts_off(tmp_path: Path, behind: Any) -> None:
    """The gateway says the same as of a dead worker; the row must not go on for ever."""
    with behind() as (engine, one, two):
        one.script = two.script = lambda sent: "disconnect" if sent.prompt == "row 3" else "answer"
        job = job_of(tmp_path, engine, rows=10, limits={"max_attempts": 3, "max_failed_rows": 1})
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 9, 1)
    bad = results_of(job)[3]
    assert bad["attempts"] == 3
    assert "error sending request" in bad["error"]


@pytest.mark.gateway
@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("what", ["busy 503", "busy 429", "gateway 504"])
def test_a_row_that_every_worker_refuses_for_now(tmp_path: Path, behind: Any, what: Behaviour) -> None:
    """It is given up while others are answered, whichever worker it comes to."""
    with behind() as (engine, one, two):
        one.script = two.script = lambda sent: what if sent.prompt == "row 3" else "answer"
        job = job_of(tmp_path, engine, rows=10, limits={"max_failed_rows": 1, "engine_wait": 60})
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 9, 1)
    assert " times while others were answered: " in results_of(job)[3]["error"]


@pytest.mark.gateway
def test_what_stands_in_the_way(
    real_gateway: RealGateway, behind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gateway that is not there, is not one, has no workers or wants a key: a sentence each, exit 2."""

    def said(url: str) -> str:
        job = job_of(tmp_path, {"kind": "gateway", "url": url})
        result = run_job(job, tmp_path, code=2)
        return result.stderr.splitlines()[-1]

    assert "has no workers" in said(real_gateway.url)
    with FakeSGLang() as server:
        assert "is not SGLang's Model Gateway" in said(server.url)
    assert "start the gateway, or correct engine.url" in said(f"http://127.0.0.1:{free_port()}")
    with behind():
        monkeypatch.setenv(KEY_VARIABLE, "wrong")
        assert "refuses the API key" in said(real_gateway.url)
    monkeypatch.setenv(KEY_VARIABLE, real_gateway.key)
    assert "must be within reach from here too" in said(real_gateway.url)


EACH: dict[str, Any] = {
    "max_new_tokens": 5, "min_new_tokens": 1, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
    "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1,
    "stop": ["x"], "stop_token_ids": [3], "stop_regex": ["a"], "no_stop_trim": True, "ignore_eos": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "sampling_seed": 7,
    "json_schema": '{"type": "object"}', "regex": "a+", "ebnf": 'root ::= "a"', "structural_tag": '{"a": 1}',
    "logit_bias": {"5": 1.0}, "custom_params": {"z": 1},
}  # fmt: skip


@pytest.mark.gateway
@pytest.mark.parametrize("kind", ["text", "input_ids", "messages"])
async def test_requests_pass_as_they_are(real_gateway: RealGateway, kind: str) -> None:
    """The installed gateway leaves nothing out, and adds nothing."""
    assert EACH.keys() | {"lora_path", "tool_choice"} == SamplingSpec.model_fields.keys()
    prompt = {"text": "x", "input_ids": [1, 2], "messages": [{"role": "user", "content": "x"}]}[kind]
    reference = RowRef(0, pa.RecordBatch.from_pylist([{}]), 0)
    request = Request(reference, kind, prompt, EACH, "adapter")  # type: ignore[arg-type]
    body = {**wire.body_of(request), "priority": 3, "rid": "r", "not_known": [1]}
    headers = {"Authorization": f"Bearer {real_gateway.key}"}
    with FakeSGLang(api_key=real_gateway.key) as worker:
        await real_gateway.use(worker.url)
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(real_gateway.url + wire.path_of(request), json=body) as reply,
        ):
            assert reply.status == 200
        await real_gateway.use()
    assert [sent.body for sent in worker.sent] == [body]


@pytest.mark.gateway
@pytest.mark.usefixtures("full_requests", "quick_retries")
@pytest.mark.parametrize("prompt", [{"input_ids": "ids"}, {"user": "{{ id }}"}])
def test_a_gateway_that_has_no_workers_for_a_while(
    tmp_path: Path, real_gateway: RealGateway, behind: Any, prompt: dict[str, str]
) -> None:
    """It then reads requests itself and refuses what it does not understand: no row fails of that."""
    with behind() as (engine, one, two), ThreadPoolExecutor(1) as thread:
        striking: list[Future[None]] = []

        async def strike() -> None:
            await real_gateway.use()
            await asyncio.sleep(1)
            await real_gateway.use(one.url, two.url)

        def script(_: Sent) -> Behaviour:
            if len(one.sent) == 20 and not striking:
                striking.append(thread.submit(asyncio.run, strike()))
            return "answer"

        one.script = script
        one.delay_s = two.delay_s = 0.05
        sampling = {"max_new_tokens": {"column": "tokens"}, "stop_regex": "a"} if "user" in prompt else {}
        job = bundled_job(tmp_path, engine, [[row] for row in range(400)], prompt=prompt, sampling=sampling)
        report = batchrunner.run({**job, "limits": {"max_attempts": 1}})
        striking[0].result()
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 400, 0)
    assert report.retries > 0
    assert rows_in(job) == list(range(400))


@pytest.mark.gateway
def test_a_gateway_that_dies(tmp_path: Path, loop_runner: asyncio.Runner) -> None:
    """What is told of it has nothing of the picture that it prints at its start."""
    process = RealGateway(tmp_path / "logs").process

    async def die() -> None:
        await process.start()
        assert process._process is not None
        watching = asyncio.create_task(process.watch())
        for pid in descendants_of(process._process.pid):
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: len(process.incidents) == 2)
        watching.cancel()
        await process.close()

    loop_runner.run(die())
    died, back = process.incidents
    assert (died.what, back.what) == ("died", "back")
    assert died.why == f"the gateway died (exit 137): its log says nothing [{process.log_path}]"


@pytest.mark.gateway
@pytest.mark.parametrize("reads", [{"disable-retries": False}, {"policy": "cache_aware"}])
def test_a_gateway_that_reads_requests(
    tmp_path: Path, loop_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, reads: dict[str, Any]
) -> None:
    """It would leave out what it does not know: the run does not start."""
    gateway = RealGateway(tmp_path / "logs", **reads)
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    loop_runner.run(gateway.process.start())
    try:
        with FakeSGLang(api_key=gateway.key) as worker:
            loop_runner.run(gateway.use(worker.url))
            job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url})
            said = run_job(job, tmp_path, code=2).stderr
    finally:
        loop_runner.run(gateway.process.close())
    assert "the gateway reads requests, or has no worker that is ready (422: Failed to deserialize" in said
    assert "start smg 1.13 with --disable-retries" in said
