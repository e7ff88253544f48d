"""`batchrun compare` shows what differs between runs of one job, and what that did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

import batchrunner
from batchrunner.output.events import read_events
from tests.conftest import batchrun, job_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.sglang_logs import LogWriter


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with runs of one job: `before`, `wide` (another window), and `short`."""
    directory = tmp_path_factory.mktemp("lab")
    with FakeSGLang() as server:
        for name, changes in (
            ("before", {}),
            ("wide", {"window": 64, "sampling": {"temperature": 0.5}}),
            ("short", {"input": {"limit": 4}}),
            ("other-prompt", {"prompt": {"user": "Say {{ text }}"}}),
        ):
            batchrunner.run(
                job_of(directory, server, rows=30, **{"output": {"path": str(directory / name)}, **changes})
            )
        other = directory / "more"
        other.mkdir()
        batchrunner.run(job_of(other, server, rows=31))
    return directory


@pytest.fixture
def own(lab: Path, tmp_path: Path) -> Path:
    """Return a copy of two of these runs, for a test to change."""
    for name in ("before", "wide"):
        shutil.copytree(lab / name, tmp_path / name)
    return tmp_path


def compared(*runs: Path) -> dict[str, Any]:
    shown = batchrun("compare", *runs, "--json")
    assert shown.exit_code == 0, shown.stderr
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def tell(run: Path, rate: int, seconds: int = 100) -> None:
    """Write the events of a run that generates so many tokens a second, with some noise."""
    lines: list[dict[str, Any]] = [{"time": 1000.0, "elapsed_s": 0.0, "event": "start", "rows_total": 9000}]
    tokens = 0
    for at in range(seconds):
        load = {"running": rate // 10, "queue": 300, "token_usage": 0.9, "max_running": 256, "scheduler": "e"}
        lines.append(
            {
                "time": 1000.0 + at, "elapsed_s": at, "event": "sample", "rows_total": 9000, "rows_done": at,
                "in_flight": 400, "window": 400, "output_tokens": tokens, "prompt_tokens": 4 * tokens,
                "output_tokens_per_s": rate, "retractions": at // 10, "signals": [load], "bands": {},
                "resting": 0,
            }
        )  # fmt: skip
        tokens += rate + (7 * at % 20)
    (run / "events.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_what_differs_and_what_it_did(own: Path) -> None:
    """The first run's figures stand beside the others', whose rates have a ratio with an interval."""
    before, wide = own / "before", own / "wide"
    tell(before, 1000)
    tell(wide, 1300)
    first_flags: dict[str, Any] = {
        "chunked_prefill_size": 2048,
        "port": 1,
        "api_key": "one",
        "ssl_keyfile_password": "a",
    }
    LogWriter().started(**first_flags).write(before, "engine-server.log")
    other_flags: dict[str, Any] = {
        "chunked_prefill_size": 8192,
        "port": 2,
        "api_key": "two",
        "ssl_keyfile_password": "b",
    }
    LogWriter().started(**other_flags).write(wide, "engine-server.log")
    found = compared(before, wide)
    assert found["changed"] == {
        "job.window": [None, 64],
        "job.sampling.temperature": [None, 0.5],
        "flag.chunked_prefill_size": [2048, 8192],
    }
    first, second = found["runs"]
    assert first["figures"]["rows_ok"] == second["figures"]["rows_ok"] == 30
    assert first["figures"]["retractions"] == 9
    assert second["figures"]["median_running"] == 130
    assert second["ratios"]["median_running"] == pytest.approx(1.3)
    steady = second["steady"]["output_tokens_per_s"]
    assert 1.29 < steady["interval"][0] < steady["ratio"] < steady["interval"][1] < 1.305
    lines = batchrun("compare", before, wide).stdout.splitlines()
    assert [line.split() for line in lines if line.startswith(("window", "--chunked"))] == [
        ["window", "unset", "64"],
        ["--chunked-prefill-size", "2048", "8192"],
    ]
    (line,) = (line for line in lines if line.startswith("output tokens/s, steady"))
    assert "(1.30 x, 1.30-1.30)" in line
    assert "note: the sampling differs, so outputs differ: compare tokens/s, not rows/s" in lines


def test_a_flag_of_the_job_is_told_once(own: Path) -> None:
    """The server's log says what the job gave it: one change, unless the server made another of it."""
    for run, size, dtype in ((own / "before", 2048, "a"), (own / "wide", 8192, "b")):
        facts = json.loads((run / "run.json").read_text())
        facts["job"]["engine"]["args"] = {"chunked-prefill-size": size, "dtype": dtype}
        (run / "run.json").write_text(json.dumps(facts))
        flags: dict[str, Any] = {"chunked_prefill_size": size, "dtype": f"float{size}"}
        LogWriter().started(**flags).write(run, "engine-server.log")
    changed = compared(own / "before", own / "wide")["changed"]
    assert [name for name in changed if "prefill" in name] == ["job.engine.args.chunked-prefill-size"]
    assert changed["flag.dtype"] == ["float2048", "float8192"]


def test_a_run_beside_itself(lab: Path) -> None:
    """Nothing differs, each ratio is 1, and a run of a moment has no interval."""
    found = compared(lab / "before", lab / "before", lab / "before")
    assert found["changed"] == {}
    assert len(found["runs"]) == 3
    known = [ratio for run in found["runs"] for ratio in run["ratios"].values() if ratio is not None]
    assert set(known) == {1.0}
    assert [note for note in found["notes"] if "too few for an interval" in note]
    assert "nothing that run.json or a log tells" in batchrun("compare", *[lab / "before"] * 2).stdout


def test_runs_of_different_lengths(lab: Path, own: Path) -> None:
    """A trial with fewer rows, a run that is not done and one of several starts are compared, and told."""
    notes = compared(lab / "before", lab / "short")["notes"]
    assert "the runs have different numbers of rows: compare rates, not totals" in notes
    wide = own / "wide"
    facts = json.loads((wide / "run.json").read_text())
    (wide / "run.json").write_text(json.dumps({**facts, "rows_total": 50}))
    events = [*read_events(wide / "events.jsonl")] * 2
    (wide / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    notes = compared(own / "before", wide)["notes"]
    assert f"{wide}: 20 rows are not done yet" in notes
    assert f"{wide}: 2 starts; what it ran with is that of the last" in notes


def test_simulated_runs_are_called_so(tmp_path: Path) -> None:
    """Nobody takes the figures of invented answers for an engine's."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    run = job["output"]["path"]
    assert compared(run, run)["notes"][0] == "simulated: the figures say nothing of a real engine"


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (["other-prompt"], "other-prompt: not the same work as {lab}/before: prompt.text was 'text' and is"),
        (["wide", "more/run"], "run: not the same work as {lab}/before: its input {lab}/more/input.parquet"),
        ([], "compare: one run is no comparison: give the output paths of two or more runs"),
        (["nothing"], "{lab}/nothing: not a run's output path (no run.json)"),
        (["input.parquet"], "{lab}/input.parquet: not a run's output path (no run.json)"),
    ],
)
def test_what_cannot_be_compared(lab: Path, others: list[str], told: str) -> None:
    """One line says which run and why; the exit code is 2."""
    refused = batchrun("compare", lab / "before", *(lab / other for other in others))
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert told.format(lab=lab) in line


def test_a_run_without_samples(own: Path) -> None:
    """Its load is not known, so there is nothing to compare."""
    for text in ("", '{"event": "start", "time": 5.0}\n', "torn"):
        (own / "wide" / "events.jsonl").write_text(text)
        refused = batchrun("compare", own / "before", own / "wide")
        assert refused.exit_code == 2
        assert "wide: no event log has a sample of this run's load" in refused.stderr


def test_a_run_at_work_has_counters(tmp_path: Path) -> None:
    """Each sample counts the tokens so far, which intervals are made of."""
    job = job_of(tmp_path)
    batchrun(write_job(job, tmp_path), "-q")
    *_, last = (e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "sample")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for name in ("output_tokens", "prompt_tokens", "cached_tokens"):
        assert last[name] == report[name]
    assert last["output_tokens"] > 0
