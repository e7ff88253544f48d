"""Real replicas, which the run starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.engines.launched.fleet import LaunchedFleet
from tests.conftest import SMALL_MODEL, eventually, job_of, log_of, require_engine
from tests.support.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template begins the reasoning itself."""
    require_engine("sglang")
    model = make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
    )
    return model


def fleet_of(tiny: Path) -> dict[str, Any]:
    # one thread for a model this small: the threads of two replicas would fight for the cores
    return {
        "kind": "server", "model": str(tiny), "device": "cpu", "replicas": 2,
        "env": {"OMP_NUM_THREADS": "1"}, "args": {"reasoning-parser": "deepseek-r1"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """Two real replicas."""
    logs = tmp_path_factory.mktemp("fleet")
    with batchrunner.open_engine(fleet_of(tiny), log_dir=logs) as engine:
        yield engine


def _long_job(tmp_path: Path, engine: dict[str, Any], rows: int, tokens: int = 32) -> dict[str, Any]:
    return job_of(
        tmp_path,
        engine,
        rows=rows,
        sampling={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        output={"part_rows": 10},
        window=64,
    )


def _fleet(engine: batchrunner.OpenEngine) -> LaunchedFleet:
    made = engine.shared.engine
    assert isinstance(made, LaunchedFleet)
    return made


def _prefills(engine: batchrunner.OpenEngine) -> dict[str, int]:
    """Return how often each replica has begun rows, by what it has logged so far."""
    replicas = _fleet(engine)._replicas.values()
    return {r.url: r.log_path.read_text(errors="replace").count("Prefill batch") for r in replicas}


def _polled(job: dict[str, Any]) -> set[str]:
    """Return the schedulers whose load was polled."""
    return {signal["scheduler"] for sample in log_of(job, "sample") for signal in sample["signals"]}


def _check_reasoning(engine: batchrunner.OpenEngine) -> None:
    """The server's parser parts the reasoning, which the chat template began, from the answer."""
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    table = batchrunner.generate(["a", "b"], engine=engine, sampling=sampling)
    for row in table.to_pylist():  # cut before the answer: a random model does not end its thoughts
        assert (row["error"], row["output"], row["finish_reason"]) == (None, "", "length")
        assert row["reasoning"]
        assert row["completion_tokens"] == 6


@pytest.mark.usefixtures("full_requests")
def test_real_replicas(replicas: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """All rows are answered, by both replicas, whose loads are polled; their logs may have the key."""
    job = _long_job(tmp_path, fleet_of(tmp_path), rows=200)
    before = _prefills(replicas)
    report = batchrunner.run(job, engine=replicas)
    eventually(lambda: all(count > before[url] for url, count in _prefills(replicas).items()))
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 200, 0)
    fleet = _fleet(replicas)
    assert _polled(job) == fleet._replicas.keys()
    assert report.engine["max_running"] == 64
    _check_reasoning(replicas)
    for log in fleet._log_dir.glob("engine-*.log"):
        assert log.stat().st_mode & 0o77 == 0
    assert len(list(fleet._log_dir.glob("engine-*.log"))) == 2
