"""Real replicas behind the real Model Gateway, which the run starts; and real workers that speak gRPC."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.launched.fleet import LaunchedFleet
from batchrunner.sglang.device import CPU_ARGS, cpu_environment
from tests.conftest import SMALL_MODEL, eventually, job_of, require_engine, results_of, rows_in, write_rows
from tests.support.engine_processes import START_S, command_line, descendants_of
from tests.support.real_gateway import KEY_VARIABLE, RealGateway
from tests.support.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.gateway, pytest.mark.filterwarnings("default")]

Replicas = tuple[batchrunner.OpenEngine, LaunchedFleet]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    require_engine("sglang")
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


@pytest.fixture(scope="module")
def replicas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two real replicas, and the gateway before them."""
    engine = {
        "kind": "server", "model": str(tiny), "device": "cpu", "replicas": 2, "gateway": True,
        "env": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    with batchrunner.open_engine(engine, log_dir=tmp_path_factory.mktemp("fleet")) as opened:
        fleet = opened.shared.engine
        assert isinstance(fleet, LaunchedFleet)
        yield opened, fleet


def _through(fleet: LaunchedFleet, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    assert fleet.gateway is not None
    assert fleet.api_key is not None
    monkeypatch.setenv(KEY_VARIABLE, fleet.api_key)
    return {"kind": "gateway", "url": fleet.gateway.url, "route": "gateway"}


def _documents(rows: int, documents: int) -> list[list[int]]:
    """Return prompts that begin with one of so many documents of 200 tokens."""
    return [[1000 + row % documents] * 200 + [2000 + row] for row in range(rows)]


@pytest.mark.usefixtures("full_requests")
def test_the_same_answers_as_directly(
    replicas: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are answered, and most of their documents come from the prefix cache."""
    opened, fleet = replicas
    ids = _documents(rows=96, documents=12)
    path = write_rows(tmp_path / "ids.parquet", len(ids), ids=ids)
    parts: dict[str, Any] = {
        "input": {"path": str(path)}, "prompt": {"input_ids": "ids"},
        "sampling": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0},
    }  # fmt: skip
    through = job_of(tmp_path, _through(fleet, monkeypatch), output={"path": str(tmp_path / "a")}, **parts)
    report = batchrunner.run(through)
    assert (report.exit_code, report.rows_ok) == (0, 96)
    rows = results_of(through)
    computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows)
    assert computed <= 0.5 * sum(row["prompt_tokens"] for row in rows)  # an eighth, if all rows come in time
    direct = job_of(tmp_path, {"kind": "simulated"}, output={"path": str(tmp_path / "b")}, **parts)
    batchrunner.run(direct, engine=opened)
    assert [row["output"] for row in rows] == [row["output"] for row in results_of(direct)]


def test_a_worker_and_the_gateway_are_killed(
    replicas: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come back by themselves, and each row ends once."""
    _, fleet = replicas
    engine = _through(fleet, monkeypatch)
    job = job_of(
        tmp_path, engine, rows=300, window=48, output={"part_rows": 10},
        sampling={"max_new_tokens": 32, "ignore_eos": True, "temperature": 0},
    )  # fmt: skip

    def kill() -> None:
        parts = Path(job["output"]["path"]) / "parts"
        for count, word in ((4, "smg.launch_router"), (10, "sglang::scheduler")):
            _wait_for_parts(parts, count)
            _kill_one(word, fleet)

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill)
        report = batchrunner.run(job)
        killing.result()
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 300, 0)
    assert rows_in(job) == list(range(300))


def _wait_for_parts(directory: Path, count: int) -> None:
    eventually(lambda: len(list(directory.glob("*.parquet"))) >= count, START_S)


def _kill_one(word: str, fleet: LaunchedFleet) -> None:
    """Kill a process of the fleet: the gateway, or the scheduler of the first replica."""
    gateway = fleet.gateway
    assert gateway is not None
    launcher = gateway._process if word.startswith("smg") else fleet.servers[0]._process
    assert launcher is not None
    found = descendants_of(launcher.pid)
    if not word.startswith("smg"):
        found = [pid for pid in found if word in command_line(pid)]
    os.kill(found[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def grpc_worker(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real SGLang that speaks gRPC."""
    port, http = free_port(), free_port()
    arguments = {**CPU_ARGS, "model-path": tiny, "host": "127.0.0.1", "port": port, "grpc-port": port}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in arguments.items()]
    environment = {**os.environ, **cpu_environment(dict(os.environ))}
    log = tmp_path_factory.mktemp("grpc") / "log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", *words, "--smg-grpc-mode"),
        *("--smg-http-sidecar-port", str(http)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        eventually(lambda: process.poll() is not None or b"ready to roll" in log.read_bytes(), START_S)
        assert process.poll() is None, log.read_text()[-2000:]
        yield f"grpc://127.0.0.1:{port}"
    finally:
        for pid in [process.pid, *descendants_of(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_workers_that_speak_grpc(grpc_worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and chats pass; what the gateway would drop is refused before a row is sent."""
    gateway = RealGateway("--policy", "cache_aware", "--worker-urls", grpc_worker)
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 7}
    engine = {"kind": "gateway", "url": gateway.url}
    try:
        eventually(lambda: gateway.listed().keys() == {grpc_worker})
        chat = {"prompt": {"user": "{{ text }}"}}
        prompts: dict[str, Any] = {"text": {"text": "text"}, "chat": chat["prompt"]}
        for name, prompt in prompts.items():
            job = job_of(
                tmp_path, engine, rows=20, prompt=prompt, sampling=sampling,
                output={"path": str(tmp_path / name)},
            )  # fmt: skip
            report = batchrunner.run(job)
            assert (report.exit_code, report.rows_ok) == (0, 20)
            assert all(row["completion_tokens"] == 12 and row["prompt_tokens"] for row in results_of(job))
            assert any("speaks gRPC" in note for note in report.engine["notes"])
        refused: list[tuple[dict[str, Any], str]] = [
            ({"output": {"columns": ["logprobs"]}}, "tokens without their texts"),
            ({"sampling": {"lora_path": "adapter"}}, "drops the adapter's name"),
            ({"sampling": {"logit_bias": {"5": -100}}}, "logit_bias: .* drops this parameter"),
            (
                {**chat, "sampling": {"min_new_tokens": 2}},
                "min_new_tokens: .* drops this parameter of a chat",
            ),
            ({**chat, "output": {"columns": ["output_ids"]}}, "output_ids: .* no token ids of chats"),
        ]
        for changes, reason in refused:
            job = job_of(tmp_path, engine, **changes)
            with pytest.raises(batchrunner.BatchrunError, match=reason):
                batchrunner.run(job)
    finally:
        gateway.end()
