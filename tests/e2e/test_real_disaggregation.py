"""Real prefill and decode workers behind the real Model Gateway; only the network between them is not."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.engines.http.connections import free_port
from batchrunner.engines.launched.fleet import LaunchedFleet
from tests.conftest import SMALL_MODEL, eventually, job_of, require_engine, results_of, rows_in, write_rows
from tests.support.engine_processes import START_S, command_line, descendants_of
from tests.support.real_gateway import KEY_VARIABLE, RealGateway
from tests.support.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.gateway, pytest.mark.filterwarnings("default")]

KEY = "key-of-both-workers"
TRANSFER = {"disaggregation-transfer-backend": "mooncake"}
"""With the module in `tests/support/engine_site/mooncake`."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    require_engine("sglang")
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


BOOTSTRAP_PORT = free_port()
Halves = dict[str, LaunchedFleet]


@pytest.fixture(scope="module")
def halves(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    """A prefill and a decode worker, which are restarted when they die."""
    arguments: dict[str, dict[str, Any]] = {
        "prefill": {"disaggregation-bootstrap-port": BOOTSTRAP_PORT},
        # By default, the decode worker wants 10 GB for the KV cache of retracted requests.
        "decode": {"disaggregation-decode-retraction-backup": "cpu_tensor"},
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        patch.setenv(KEY_VARIABLE, KEY)

        def start(half: str) -> LaunchedFleet:
            engine = {
                "kind": "server", "model": str(tiny), "device": "cpu",
                "args": {"disaggregation-mode": half, **TRANSFER, **arguments[half]},
                "env": {"OMP_NUM_THREADS": "1", "SGLANG_HOST_IP": "127.0.0.1"},
            }  # fmt: skip
            log_dir = tmp_path_factory.mktemp(half)
            opened = stack.enter_context(batchrunner.open_engine(engine, log_dir=log_dir))
            fleet = opened.shared.engine
            assert isinstance(fleet, LaunchedFleet)
            return fleet

        yield dict(zip(arguments, threads.map(start, arguments), strict=True))


@pytest.fixture(scope="module")
def gateway(halves: Halves) -> Iterator[RealGateway]:
    """A gateway before both workers."""
    prefill, decode = (halves[half].servers[0].url for half in ("prefill", "decode"))
    gateway = RealGateway(
        *("--pd-disaggregation", "--prefill", prefill, str(BOOTSTRAP_PORT), "--decode", decode),
        *("--policy", "round_robin", "--load-monitor-interval", "1"),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"),
        key=KEY,
    )
    eventually(lambda: gateway.reporting() == {prefill, decode}, START_S)
    yield gateway
    gateway.end()


def _expected(model_path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return the most likely outputs by the model's own code, without SGLang."""
    import torch  # noqa: PLC0415 - takes seconds to import
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    model = LlamaForCausalLM.from_pretrained(model_path)
    ids = torch.tensor(prompts)
    outputs = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return [output[len(prompts[0]) :] for output in outputs.tolist()]


def test_a_job(gateway: RealGateway, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers are those of the model's own code, and the prefill worker reports its cached tokens."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    ids = [[1000 + row % 5] * 60 + [2000 + row % 25] for row in range(100)]
    path = write_rows(tmp_path / "ids.parquet", len(ids), ids=ids)
    job = job_of(
        tmp_path, {"kind": "gateway", "url": gateway.url}, input={"path": str(path)},
        prompt={"input_ids": "ids"}, output={"columns": ["output_ids"]},
        sampling={"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
    )  # fmt: skip
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 100, 0)
    assert rows_in(job) == list(range(100))
    rows = results_of(job)
    assert sum(row["cached_tokens"] for row in rows) > 0
    expected = _expected(tiny, ids[:25], 12)
    assert [row["output_ids"] for row in rows] == expected * 4


def test_prompts_and_outputs(gateway: RealGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and chats pass, with a regular expression, a JSON schema, log probabilities and seeds."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    schema = {"type": "boolean"}
    jobs: list[dict[str, Any]] = [
        {"prompt": {"text": "text"}, "sampling": {"regex": "yes|no"}, "output": {"columns": ["logprobs"]}},
        {"prompt": {"user": "{{ text }}"}, "sampling": {"json_schema": schema, "sampling_seed": 7}},
    ]
    for number, parts in enumerate(jobs):
        output = {"path": str(tmp_path / str(number)), **parts.pop("output", {})}
        job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=12, output=output, **parts)
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok) == (0, 12)
        rows = results_of(job)
        assert {row["output"] for row in rows} <= {"yes", "no", "true", "false"}
        assert all(row.get("logprobs", True) for row in rows)


def test_what_is_refused(gateway: RealGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a worker refuses is an error row; several completions would never come."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    path = write_rows(tmp_path / "ids.parquet", 3, ids=[[5] * 20, [5] * 5000, [6] * 20])
    parts: dict[str, Any] = {"input": {"path": str(path)}, "prompt": {"input_ids": "ids"}}
    engine = {"kind": "gateway", "url": gateway.url}
    job = job_of(tmp_path, engine, **parts, sampling={"n": 2})
    with pytest.raises(batchrunner.BatchrunError, match="does not answer a request for several completions"):
        batchrunner.run(job)
    job = job_of(tmp_path, engine, **parts, sampling={"max_new_tokens": 4})
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (2, 1)


def test_the_decode_worker_is_killed(
    gateway: RealGateway, halves: Halves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again, and each row ends once."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    job = job_of(
        tmp_path, {"kind": "gateway", "url": gateway.url}, rows=200, window=16, output={"part_rows": 10},
        sampling={"max_new_tokens": 24, "ignore_eos": True, "temperature": 0},
    )  # fmt: skip

    def kill() -> None:
        parts = Path(job["output"]["path"]) / "parts"
        eventually(lambda: len(list(parts.glob("*.parquet"))) >= 4, START_S)
        launcher = halves["decode"].servers[0]._process
        assert launcher is not None
        schedulers = [pid for pid in descendants_of(launcher.pid) if "sglang::scheduler" in command_line(pid)]
        os.kill(schedulers[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill)
        report = batchrunner.run(job)
        killing.result()
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert rows_in(job) == list(range(200))
