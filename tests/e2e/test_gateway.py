"""Replicas behind the real Model Gateway: fake ones for what goes wrong, real ones for what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import (
    AttemptFailedError,
    EngineBusyError,
    EngineDownError,
    EngineStartError,
    JobError,
    RowRefusedError,
)
from batchrunner.core.types import Request, RowRef
from batchrunner.engines.device import gpus
from batchrunner.engines.http import wire
from batchrunner.engines.http.connections import HeldPort, free_port, loopback_sources
from batchrunner.engines.http.worker_list import WorkerList
from batchrunner.engines.launched.fleet import LaunchedGateway, gpu_slices
from batchrunner.engines.launched.gateway import gateway_process, start_gateway
from batchrunner.engines.registry import make_engine, model_of
from batchrunner.job.load import parse_engine
from batchrunner.job.spec import GATEWAY_DROPS, GatewayEngine, LimitsSpec, SamplingSpec
from tests.conftest import (
    SMALL_MODEL,
    batchrun,
    events_of,
    eventually,
    job_of,
    needs_gateway,
    require_engine,
    results_of,
    write_job,
)
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchrunner.engines.launched.process import LaunchedProcess

KEY_VARIABLE = "SGLANG_API_KEY"
START_S = 300

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _quiet_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway asks every worker by HTTP/2 too, which the fake's library logs as an error."""
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)


class RealGateway:
    """The real gateway in a process of its own, with whatever workers a test gives it."""

    def __init__(self, log_dir: Path) -> None:
        self.key = secrets.token_hex(8)
        spec = GatewayEngine(kind="gateway", model="of/the/fakes")
        self.process, self.url = gateway_process(spec, key=self.key, log_dir=log_dir, request_timeout_s=60)

    async def start(self) -> None:
        await start_gateway(self.process, self.url)

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
    loop_runner.run(made.start())
    try:
        yield made
    finally:
        loop_runner.run(made.process.stop())


@pytest.fixture
def behind(
    real_gateway: RealGateway, loop_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Put workers behind the gateway; returns the engine of a job."""
    monkeypatch.setenv(KEY_VARIABLE, real_gateway.key)

    def put(*workers: FakeSGLang) -> dict[str, Any]:
        loop_runner.run(real_gateway.use(*(worker.url for worker in workers)))
        return {"kind": "gateway", "url": real_gateway.url}

    yield put
    loop_runner.run(real_gateway.use())


@contextlib.contextmanager
def two_workers(key: str | None) -> Iterator[tuple[FakeSGLang, FakeSGLang]]:
    with FakeSGLang(api_key=key) as one, FakeSGLang(api_key=key) as two:
        yield one, two


@needs_gateway
@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_rows_are_shared_out(
    tmp_path: Path, real_gateway: RealGateway, behind: Any, prompt: dict[str, str]
) -> None:
    """A job on a gateway that runs already: all rows, evenly, and the load of each worker from itself."""
    with two_workers(real_gateway.key) as (one, two):
        engine = behind(one, two)
        job = job_of(tmp_path, engine, rows=60, prompt=prompt)
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 60, 0)
    assert [row["output"] for row in results_of(job)] == [f"answer 0 to row {i}" for i in range(60)]
    assert min(len(one.sent), len(two.sent)) >= 20
    assert report.engine["kind"] == "gateway"
    assert report.engine["model"] == "fake/model"
    assert (report.engine["max_running"], report.engine["routes"]) == (16, ("gateway",))
    assert any("2 workers behind the gateway" in note for note in report.engine["notes"])


@needs_gateway
def test_rows_that_begin_alike_stay_together(tmp_path: Path, real_gateway: RealGateway, behind: Any) -> None:
    """Each document's questions go to one worker, and documents are shared out."""
    documents = [f"document {number} " * 60 for number in range(12)]
    texts = [documents[row % 12] + f"question {row}" for row in range(240)]
    path = tmp_path / "input.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    with two_workers(real_gateway.key) as (one, two):
        job = job_of(tmp_path, behind(one, two), window=40)
        assert batchrunner.run(job).rows_ok == 240
        at = [{sent.prompt.partition("question")[0] for sent in worker.sent} for worker in (one, two)]
    assert at[0] | at[1] == set(documents)
    assert at[0].isdisjoint(at[1])
    assert min(map(len, at)) >= 3


@needs_gateway
async def test_signals_come_from_each_worker(real_gateway: RealGateway, tmp_path: Path) -> None:
    """Each worker is a scheduler on the one route; a worker that is added later is found."""
    with two_workers(real_gateway.key) as (one, two), FakeSGLang(api_key=real_gateway.key) as three:
        await real_gateway.use(one.url, two.url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, real_gateway.key)
            patch.setattr("batchrunner.engines.attached_gateway.REFRESH_S", 0)
            engine = make_engine(
                parse_engine({"kind": "gateway", "url": real_gateway.url}),
                log_dir=tmp_path,
                limits=LimitsSpec(request_timeout=30),
            )
            try:
                info = await engine.open()
                assert info.routes == ("gateway",)
                signals = await engine.signals()
                assert {(s.scheduler, s.route) for s in signals} == {
                    (one.url, "gateway"),
                    (two.url, "gateway"),
                }
                await real_gateway.use(one.url, two.url, three.url)
                assert len(await engine.signals()) == 3
            finally:
                await engine.close()
        await real_gateway.use()


@needs_gateway
@pytest.mark.usefixtures("quick_retries")
def test_worker_that_goes_and_comes_back(tmp_path: Path, real_gateway: RealGateway, behind: Any) -> None:
    """No row is lost or doubled, and none uses up its tries while the gateway still sends it there."""
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(FakeSGLang(api_key=real_gateway.key))
        two = stack.enter_context(FakeSGLang(api_key=real_gateway.key, port=free_port()))
        back: list[FakeSGLang] = []

        def end_at(sent: Sent) -> Any:
            return "die" if len(two.sent) == 20 else "answer"

        def come_back(_: Sent) -> Any:
            if len(one.sent) == 100 and not back:
                back.append(stack.enter_context(FakeSGLang(api_key=real_gateway.key, port=two.port)))
            return "answer"

        two.script, one.script = end_at, come_back
        engine = behind(one, two)
        # two tries, for a row that is refused just before and asked about just after the worker is back
        job = job_of(tmp_path, engine, rows=400, limits={"max_attempts": 2}, window=8)
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 400, 0)
        assert report.retries > 0
        assert [row["row"] for row in results_of(job)] == list(range(400))
        assert back
        assert len(back[0].sent) > 50


@needs_gateway
@pytest.mark.usefixtures("quick_retries")
def test_row_that_a_living_worker_always_cuts_off(
    tmp_path: Path, real_gateway: RealGateway, behind: Any
) -> None:
    """The gateway says the same as of a dead worker; the row must not go on for ever."""
    with two_workers(real_gateway.key) as (one, two):
        one.script = two.script = lambda sent: "disconnect" if sent.prompt == "row 3" else "answer"
        job = job_of(tmp_path, behind(one, two), rows=10, limits={"max_attempts": 3, "max_failed_rows": 1})
        report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 9, 1)
    bad = results_of(job)[3]
    assert bad["attempts"] == 3
    assert "error sending request" in bad["error"]


@needs_gateway
def test_worker_of_others_that_hangs(
    tmp_path: Path, real_gateway: RealGateway, behind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else would say so: the warning and the event name the worker; its rows end when it moves."""
    with two_workers(real_gateway.key) as (one, two):
        one.script = lambda _: "hold"
        job = job_of(tmp_path, behind(one, two), rows=100, window=16, limits={"hang": 0.3})

        def wake() -> None:
            try:
                eventually(lambda: events_of(job))
            finally:  # a failure is to be seen, not waited for
                one.answer_held()

        waker = threading.Thread(target=wake)
        waker.start()
        report = batchrunner.run(job)
        waker.join()
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 100, 0)
    assert set(events_of(job)) == {"engine_hangs"}
    assert f"{one.url} did nothing for" in caplog.text
    assert f"{two.url} did nothing" not in caplog.text


@needs_gateway
def test_what_stands_in_the_way(
    real_gateway: RealGateway, behind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A gateway that is not there, is not one, has no workers or wants a key: a sentence each, exit 2."""

    def said(url: str) -> str:
        job = job_of(tmp_path, {"kind": "gateway", "url": url})
        result = batchrun(write_job(job, tmp_path))
        assert result.exit_code == 2
        return result.stderr.splitlines()[-1]

    behind()
    assert "has no workers" in said(real_gateway.url)
    with FakeSGLang() as server:
        assert "is not SGLang's Model Gateway" in said(server.url)
    assert "start the gateway, or correct engine.url" in said(f"http://127.0.0.1:{free_port()}")
    with FakeSGLang(api_key=real_gateway.key) as worker:
        behind(worker)
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


@needs_gateway
@pytest.mark.parametrize("chat", [True, False])
async def test_what_the_gateway_leaves_out(real_gateway: RealGateway, chat: bool) -> None:
    """`GATEWAY_DROPS` is what the installed gateway really loses, and all of it."""
    assert EACH.keys() | {"lora_path"} == SamplingSpec.model_fields.keys()
    lost = set()
    headers = {"Authorization": f"Bearer {real_gateway.key}"}
    with FakeSGLang(api_key=real_gateway.key) as worker:
        await real_gateway.use(worker.url)
        async with aiohttp.ClientSession(headers=headers) as session:
            for name, value in EACH.items():
                request = _request(name, {name: value}, chat=chat)
                body = wire.body_of(request)
                async with session.post(real_gateway.url + wire.path_of(request), json=body) as reply:
                    got = worker.sent[-1].body if reply.status == 200 else {}
                sent = body if chat else body["sampling_params"]
                passed = got if chat else got["sampling_params"]
                if any(passed.get(key) != sent[key] for key in sent if key != "return_meta_info"):
                    lost.add(name)
                if got and chat:
                    assert got["lora_path"] == "adapter"
        await real_gateway.use()
    assert lost == GATEWAY_DROPS["chat" if chat else "generate"]


def _request(text: str, sampling: dict[str, Any], *, chat: bool) -> Request:
    reference = RowRef(0, pa.RecordBatch.from_pylist([{}]), 0)
    prompt = [{"role": "user", "content": text}] if chat else text
    return Request(reference, "messages" if chat else "text", prompt, sampling, "adapter")


def test_lost_parameters_are_refused(tmp_path: Path) -> None:
    """Before the run where the job has them; row by row where it does not know its engine."""
    for prompt, name, refused in [
        ({"text": "text"}, "logit_bias", True),
        ({"user": "{{ text }}"}, "logit_bias", False),
        ({"user": "{{ text }}"}, "stop_regex", True),
    ]:
        engine = {"kind": "gateway", "model": "some/model"}
        job = job_of(tmp_path, engine, prompt=prompt, sampling={name: EACH[name]})
        result = batchrun("check", write_job(job, tmp_path))
        assert (result.exit_code == 2) is refused
        assert (f"sampling.{name}" in result.stderr) is refused
    with pytest.raises(RowRefusedError, match="stop_regex"):
        wire.refuse_dropped(_request("x", {"stop_regex": "a"}, chat=True))


def _error_body(code: str) -> bytes:
    message = "error sending request for url (http://127.0.0.1:1/generate)"
    return json.dumps({"error": {"type": "Internal Server Error", "code": code, "message": message}}).encode()


def test_what_the_gateway_says() -> None:
    """A worker out of reach is nobody's fault and no sign of load; other errors mean what they always do."""
    for status, code in [(500, "call_upstream_request_error"), (503, "no_available_workers")]:
        assert type(wire.error_of(status, _error_body(code))) is EngineDownError
    assert type(wire.error_of(500, _error_body("internal_error"))) is AttemptFailedError
    assert (
        type(wire.error_of(503, b'{"error": {"message": "The request queue is full."}}')) is EngineBusyError
    )
    assert type(wire.error_of(500, b"[]")) is AttemptFailedError


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({}, "give `model`"),
        ({"model": "a", "url": "http://a"}, "give `model`"),
        ({"url": "a"}, "starts with http"),
        ({"url": "http://a", "tp": 2}, "tp: goes with `model`"),
        ({"model": "a", "args": {"tp_size": 2}}, "say engine.tp"),
        ({"model": "a", "gateway_args": {"--port": 2}}, "leave it out of engine.gateway_args"),
        ({"model": "a", "replicas": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_jobs(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        parse_engine({"kind": "gateway", **engine})


def test_model_is_known_before_the_engine(tmp_path: Path) -> None:
    """As a launched server's is, so that a finished run needs no engine to be found finished."""
    assert model_of(parse_engine({"kind": "gateway", "model": "org/model"})) == "org/model"
    assert model_of(parse_engine({"kind": "gateway", "url": "http://a:1"})) is None
    missing = job_of(tmp_path, {"kind": "gateway", "model": "/no/such/model"})
    result = batchrun("check", write_job(missing, tmp_path))
    assert result.exit_code == 2
    assert "no such model directory" in result.stderr


def test_gpus_are_dealt_out() -> None:
    assert gpu_slices([], 1, "auto") == [[]]
    assert gpu_slices([], 1, 2) == [[], []]
    assert gpu_slices(["0", "1", "2", "3"], 1, "auto") == [["0"], ["1"], ["2"], ["3"]]
    assert gpu_slices(["4", "5", "6"], 2, "auto") == [["4", "5"]]
    assert gpu_slices(["a", "b"], 1, 1) == [["a"]]
    with pytest.raises(EngineStartError, match="needs 2 GPUs: 1 there"):
        gpu_slices(["0"], 2, "auto")
    with pytest.raises(EngineStartError, match="needs 3 GPUs: 2 there"):
        gpu_slices(["0", "1"], 1, 3)


@pytest.mark.parametrize(
    ("args", "slices"),
    [
        ({}, ["4", "5", "6", "7"]),
        ({"pp-size": 2}, ["4,5", "6,7"]),
        ({"data-parallel-size": 2}, ["4,5", "6,7"]),
        ({"dp-size": 2, "enable-dp-attention": True}, ["4", "5", "6", "7"]),
        ({"dp_size": 2, "enable_dp_attention": True}, ["4", "5", "6", "7"]),
    ],
)
def test_the_jobs_own_gpus_are_dealt_out(
    args: dict[str, Any], slices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that `env` leaves every replica gets its own, as many as its arguments take."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    spec = GatewayEngine(kind="gateway", model="org/model", args=args, env=env)
    servers = LaunchedGateway(spec, log_dir=tmp_path, limits=LimitsSpec())._make_servers("o/m", cpu=False)
    assert [server.process.environ["CUDA_VISIBLE_DEVICES"] for server in servers] == slices
    for server in servers:
        asyncio.run(server.stop())  # gives its port back


def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, seen in [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus() == seen


def test_command_lines(tmp_path: Path) -> None:
    """The job's own arguments win over ours, and each replica has its own port, log and GPUs."""
    spec = GatewayEngine(
        kind="gateway", model="org/model", replicas=2, tp=2, gateway_args={"log_level": "info"}
    )
    fleet = LaunchedGateway(spec, log_dir=tmp_path, limits=LimitsSpec())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        made = fleet._make_servers("org/model", cpu=False)
    servers = [server.process for server in made]
    assert [server.environ["CUDA_VISIBLE_DEVICES"] for server in servers] == ["0,1", "2,3"]
    assert all("--tp-size 2" in " ".join(server.argv) for server in servers)
    assert len({server.argv[server.argv.index("--port") + 1] for server in servers}) == 2
    assert [server.log_path.name for server in servers] == ["engine-replica-0.log", "engine-replica-1.log"]
    gateway, _ = gateway_process(spec, key=fleet._key, log_dir=tmp_path, request_timeout_s=90)
    line = " ".join(gateway.argv)
    assert "--request-timeout-secs 150" in line
    assert "--log-level info" in line
    assert "--policy manual --assignment-mode min_load" in line
    assert fleet._key not in line
    for server in made:
        asyncio.run(server.stop())  # gives its port back


def test_interpreter_without_a_gateway(tmp_path: Path) -> None:
    """It is told so by name, with what to install."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    spec = GatewayEngine(kind="gateway", model="org/model", python=f"{bare}/bin/python")
    process, url = gateway_process(spec, key="x", log_dir=tmp_path, request_timeout_s=9)
    with pytest.raises(EngineStartError, match=r"has no sglang_router: install batchrunner\[gateway\]"):
        asyncio.run(start_gateway(process, url))


def test_ports_to_listen_on_are_not_for_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < low for _ in range(20))


def test_a_held_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of a node that draw the same port do not both start a server on it."""
    one, other = free_port(), free_port()
    drawn = iter([one, one, other, one])
    monkeypatch.setattr("batchrunner.engines.http.connections.free_port", lambda: next(drawn))
    ours = HeldPort()
    theirs = HeldPort()
    ours.release()
    later = HeldPort()
    assert (ours.number, theirs.number, later.number) == (one, other, one)
    theirs.release()
    later.release()


def test_connections_from_several_addresses() -> None:
    """Where one address of ours has no port left, the next has: shown with a range of four ports."""
    ip_local_port_range, first = 51, 40_000
    narrow = struct.pack("I", ((first + 3) << 16) | first)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect(make: Any) -> str:
            address = server.getsockname()
            made = stack.enter_context(make((socket.AF_INET, socket.SOCK_STREAM, 0, "", address)))
            made.setblocking(True)
            try:
                made.setsockopt(socket.IPPROTO_IP, ip_local_port_range, narrow)
            except OSError:
                pytest.skip("skipped: the kernel has no port range for one socket (Linux < 6.3)")
            made.connect(address)
            host: str = made.getsockname()[0]
            return host

        one, two = loopback_sources(1), loopback_sources(2)
        taken = Counter(connect(two) for _ in range(6))
        assert taken == {"127.0.0.1": 3, "127.0.0.2": 3}
        with pytest.raises(OSError, match="assign requested address"):  # noqa: PT012
            for _ in range(4):
                connect(one)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_engine("sglang", "sglang_router")
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


def fleet_of(tiny: Path) -> dict[str, Any]:
    # one thread for a model this small: the threads of two replicas would fight for the cores
    return {
        "kind": "gateway", "model": str(tiny), "device": "cpu", "replicas": 2,
        "env": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """Two real replicas behind the real gateway."""
    logs = tmp_path_factory.mktemp("fleet")
    with batchrunner.open_engine(fleet_of(tiny), log_dir=logs) as engine:
        yield engine


def _long_job(tmp_path: Path, engine: dict[str, Any], rows: int, tokens: int = 64) -> dict[str, Any]:
    return job_of(
        tmp_path,
        engine,
        rows=rows,
        sampling={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        output={"part_rows": 50},
    )


def _marked(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.engine
def test_killed_runner_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    """SIGKILL of the runner ends the replicas and the gateway. (First: before the fixture's own are up.)"""
    job = _long_job(tmp_path, fleet_of(tiny), rows=5000)
    command = [sys.executable, "-m", "batchrunner.cli", str(write_job(job, tmp_path))]
    environ = {**os.environ, "BATCHRUNNER_TEST_MARK": str(tmp_path)}
    marker = f"BATCHRUNNER_TEST_MARK={tmp_path}"
    parts = tmp_path / "run" / "parts"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while not list(parts.glob("part-*.parquet")):
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert len(_marked(marker)) >= 9  # runner, 3 launchers, 2 servers with a scheduler each, gateway
        finally:
            process.kill()
    deadline = time.monotonic() + 30
    while _marked(marker):
        assert time.monotonic() < deadline, "something outlived the runner"
        time.sleep(0.1)
    assert pq.read_table(parts).num_rows >= 50


def _fleet(engine: batchrunner.OpenEngine) -> LaunchedGateway:
    made = engine._engine
    assert isinstance(made, LaunchedGateway)
    return made


def _descendants(pid: int) -> list[int]:
    """Return what a process has started, and only that, by the kernel's own lists of children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _signal(process: LaunchedProcess, number: signal.Signals) -> None:
    """Send a signal to the program and all that it started, and not to its launcher."""
    assert process._process is not None
    assert process._process.returncode is None
    victims = _descendants(process._process.pid)
    assert victims
    assert os.getpid() not in victims
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _run_and(
    engine: batchrunner.OpenEngine, job: dict[str, Any], strike: Callable[[], None], parts: int = 1
) -> Any:
    """Run a job; strike once it has written so many parts."""

    def wait_and_strike() -> None:
        folder = Path(job["output"]["path"]) / "parts"
        deadline = time.monotonic() + START_S
        while len(list(folder.glob("part-*.parquet"))) < parts and time.monotonic() < deadline:
            time.sleep(0.05)
        strike()

    striker = threading.Thread(target=wait_and_strike)
    striker.start()
    report = batchrunner.run(job, engine=engine)
    striker.join()
    return report


def _schedulers(job: dict[str, Any], since: float = 0.0) -> set[str]:
    """Return those that were seen to run rows."""
    lines = (Path(job["output"]["path"]) / "events.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines if '"sample"' in line]
    samples = [sample for sample in samples if sample["time"] >= since]
    return {s["scheduler"] for sample in samples for s in sample["signals"] if s["running"] > 0}


@pytest.mark.engine
def test_real_replicas(replicas: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """All rows are answered, by both replicas, whose loads are polled; the key is in no log."""
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=300)
    report = batchrunner.run(job, engine=replicas)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 300, 0)
    fleet = _fleet(replicas)
    assert _schedulers(job) == {server.url for server in fleet._servers}
    assert report.engine["max_running"] == 64
    for log in fleet._log_dir.glob("engine-*.log"):
        assert fleet._key not in log.read_text(errors="replace")
    assert len(list(fleet._log_dir.glob("engine-*.log"))) == 3


@pytest.mark.engine
def test_replica_that_is_killed(
    replicas: batchrunner.OpenEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again and put back; no row is lost, written twice, or blamed."""
    fleet = _fleet(replicas)
    victim = fleet._servers[0]
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=1200)
    job["limits"] = {"max_attempts": 1}
    report = _run_and(replicas, job, lambda: _signal(victim.process, signal.SIGKILL), parts=2)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 1200, 0)
    assert [row["row"] for row in results_of(job)] == list(range(1200))
    assert report.retries > 0
    deadline = time.monotonic() + START_S
    while "replica 0 is back" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "replica 0 died (exit 137)" in caplog.text
    assert "replica 0 is back" in caplog.text
    again = _long_job(tmp_path / "again", fleet_of(tmp_path), rows=200)
    assert batchrunner.run(again, engine=replicas).rows_ok == 200
    assert victim.url in _schedulers(again)


@pytest.mark.engine
def test_replica_that_stands_still(replicas: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """A replica that is stopped for 20 s keeps its rows; woken, it does them, and both go on."""
    victim, other = _fleet(replicas)._servers
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=2000)
    job["limits"] = {"max_attempts": 1}
    woken: list[float] = []

    def hold() -> None:
        _signal(victim.process, signal.SIGSTOP)
        time.sleep(20)
        _signal(victim.process, signal.SIGCONT)
        woken.append(time.time())

    report = _run_and(replicas, job, hold, parts=2)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 2000, 0)
    assert [row["row"] for row in results_of(job)] == list(range(2000))
    assert _schedulers(job, since=woken[0] + 1) == {victim.url, other.url}


@pytest.mark.engine
def test_gateway_that_is_killed(
    replicas: batchrunner.OpenEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again with both replicas, and the run goes on."""
    fleet = _fleet(replicas)
    gateway = fleet._gateway
    assert gateway is not None
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=600)
    job["limits"] = {"max_attempts": 1}
    report = _run_and(replicas, job, lambda: _signal(gateway, signal.SIGKILL))
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 600, 0)
    assert [row["row"] for row in results_of(job)] == list(range(600))
    assert "the gateway died (exit 137)" in caplog.text
    assert "the gateway is back" in caplog.text
