"""The real SGLang on the CPU: the jobs that we ship, and what only a real engine can show.

`make test` installs the engine and prepares the model. Where they are missing these tests are skipped by
name; under CI they fail instead, so that a missing install cannot hide.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import ROOT, SMALL_MODEL, require_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = ROOT / "jobs"
START_S = 600
"""A start takes half a minute on a quiet machine, and minutes on a busy one."""

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    require_engine("sglang")


@pytest.fixture(scope="module")
def smollm(_prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """The real chat model on a launched server."""
    spec = {"kind": "server", "model": str(SMALL_MODEL), "device": "cpu"}
    logs = tmp_path_factory.mktemp("smollm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with batchrunner.open_engine(spec, log_dir=logs) as engine:
            yield engine


def _run_job(name: str, engine: batchrunner.OpenEngine, out: Path, *overrides: str) -> tuple[Any, pa.Table]:
    report = batchrunner.run(JOBS / name, engine=engine, overrides=[f"output.path={out}", *overrides])
    return report, pq.read_table(out / "parts").sort_by("row")


def test_summarize_job(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """The main job gives real sentences, token counts and load from a real model."""
    report, table = _run_job("summarize.yaml", smollm, tmp_path / "run", "input.limit=6")
    assert (report.exit_code, report.rows_ok, report.simulated) == (0, 6, False)
    assert all(len(text.split()) > 3 for text in table["output"].to_pylist())
    assert min(table["prompt_tokens"].to_pylist()) > 20
    assert max(table["cached_tokens"].to_pylist()) > 0  # the rows share their system prompt
    assert report.engine["version"] == importlib.import_module("sglang.version").__version__
    assert 44 <= report.window <= 32 + 250  # what it runs, and its band


def test_classify_job(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """The engine holds the output to the JSON schema."""
    report, table = _run_job("classify.yaml", smollm, tmp_path / "run", "input.limit=4")
    assert report.rows_ok == 4
    for text in table["output"].to_pylist():
        answer = json.loads(text)
        assert answer["kind"] in {"function", "class", "module", "constant"}
        assert answer["confidence"] in {"low", "medium", "high"}


def test_translate_job(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """Two samples a row arrive as lists, and a renamed column under its new name."""
    report, table = _run_job("translate.yaml", smollm, tmp_path / "run", "input.limit=4")
    assert report.rows_ok == 4
    assert all(len(texts) == 2 for texts in table["output"].to_pylist())
    assert all(min(counts) > 0 for counts in table["completion_tokens"].to_pylist())
    assert "source" in table.column_names


def test_raw_tokens_job(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """Token ids reach the engine as they are: it counts as many prompt tokens as the column holds."""
    report, table = _run_job("raw_tokens.yaml", smollm, tmp_path / "run", "input.limit=4")
    assert report.rows_ok == 4
    ids = pq.read_table(ROOT / "data" / "tokens.parquet")["input_ids"].to_pylist()[:4]
    assert table["prompt_tokens"].to_pylist() == [len(row) for row in ids]


def test_bad_rows_do_not_end_the_run(smollm: batchrunner.OpenEngine) -> None:
    """An over-long row, and rows that SGLang itself would die of, fail alone; the others are answered."""
    texts = ["The capital of France is", "", "word " * 6000, None, "Paris is the capital of"]
    table = batchrunner.generate(
        pa.table({"text": pa.array(texts)}),
        prompt={"text": "text"},
        engine=smollm,
        sampling={"max_new_tokens": 8, "temperature": 0},
        limits={"max_failed_rows": 5},
    )
    errors = table["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, False, True]
    assert "longer than the model's context length" in errors[2]
    assert "Paris" in table["output"][0].as_py()

    ids = pa.array([[504, 3575, 282], [10_000_000], [-1], []], type=pa.list_(pa.int64()))
    table = batchrunner.generate(
        pa.table({"ids": ids}),
        prompt={"input_ids": "ids"},
        engine=smollm,
        sampling={"max_new_tokens": 4, "ignore_eos": True},
        limits={"max_failed_rows": 5},
    )
    assert [error is None for error in table["error"].to_pylist()] == [True, False, False, False]


BEGINNINGS = (
    "The capital of France",
    "日本語の",
    "Zürich liegt",
    "👩‍👩‍👧 means",
    "def f(x):\n",
    "1, 2, 3,",
    "Ελλ",
)


def test_rows_that_share_requests_have_the_same_answers(
    smollm: batchrunner.OpenEngine, tmp_path: Path
) -> None:
    """Byte for byte, whatever ends an answer; a row that the server refuses fails alone."""
    rows = 42
    table = pa.table({
        "text": [f"{BEGINNINGS[n % 7]} {n}" for n in range(rows)],
        "most": [1 + n % 24 for n in range(rows)],
        "least": [50 if n == 17 else 0 for n in range(rows)],  # more than the most: SGLang refuses it
    })  # fmt: skip
    pq.write_table(table, tmp_path / "input.parquet")

    def run(bundle: str) -> tuple[Any, list[dict[str, Any]]]:
        job = {
            "input": {"path": str(tmp_path / "input.parquet")},
            "prompt": {"text": "text"},
            "sampling": {
                "max_new_tokens": {"column": "most"}, "min_new_tokens": {"column": "least"},
                "temperature": 0, "stop": [" the", "\n\n", "3, 4"],
            },
            "output": {"path": str(tmp_path / f"run-{bundle}")},
            "engine": smollm.spec,
            "tokenize": "client", "order": "input", "window": 32, "bundle": bundle,
            "limits": {"max_failed_rows": 1},
        }  # fmt: skip
        report = batchrunner.run(job, engine=smollm)
        assert (report.exit_code, report.rows_failed) == (0, 1)
        found = pq.read_table(tmp_path / f"run-{bundle}" / "parts").sort_by("row").to_pylist()
        same = ("row", "output", "finish_reason", "prompt_tokens", "completion_tokens", "attempts")
        return report, [{**{name: row[name] for name in same}, "failed": bool(row["error"])} for row in found]

    report, together = run("16")
    assert report.bundles["most_rows"] > 8
    assert report.bundles["rows_resent"] > 0
    report, alone = run("off")
    assert report.bundles["most_rows"] == 1
    assert together == alone
    assert len({row["finish_reason"] for row in alone}) > 1


def test_load_is_sampled(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """The load is polled from the real server and written to the event log."""

    report, _ = _run_job(
        "summarize.yaml", smollm, tmp_path / "run", "input.limit=8", "sampling.max_new_tokens=32"
    )
    assert report.exit_code == 0
    samples = [
        json.loads(line)
        for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
        if '"sample"' in line
    ]
    signals = [signal for sample in samples for signal in sample["signals"]]
    assert signals
    assert all(signal["source"] == "loads" and signal["max_running"] == 32 for signal in signals)


def test_inprocess_engine_agrees_with_the_server(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """`sglang.Engine` in this process gives the same prompts, token for token, as the HTTP server."""
    out = tmp_path / "inprocess"
    overrides = ["input.limit=4", "sampling.max_new_tokens=12", f"output.path={out}", "bundle=2"]
    engine = f"engine={{kind: inprocess, model: {SMALL_MODEL}, device: cpu}}"
    command = [sys.executable, "-m", "batchrunner.cli", str(JOBS / "summarize.yaml"), "--set", engine]
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "report.json").read_text())["bundles"]["most_rows"] == 2
    inside = pq.read_table(out / "parts").sort_by("row")
    _, outside = _run_job(
        "summarize.yaml", smollm, tmp_path / "server", "input.limit=4", "sampling.max_new_tokens=12"
    )
    assert inside["prompt_tokens"].to_pylist() == outside["prompt_tokens"].to_pylist()
    assert inside["output"].to_pylist() == outside["output"].to_pylist()
