"""Jobs and run directories that are damaged, edited or meant to harm: one line each, and exit code 2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from tests.conftest import batchrun, job_of, write_job
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\tb: 1", "cannot start any token"),
        ("a: \0", "not valid YAML"),
        ("a: 1\na: 2", "given twice"),
    ],
)
def test_yaml_that_is_no_job(tmp_path: Path, text: str, problem: str) -> None:
    """It is refused at once."""
    told(refusal(text, tmp_path), "job.yaml", problem)


def test_a_store_that_cannot_be_reached(tmp_path: Path) -> None:
    """Packages that open a store raise errors of their own."""
    job = job_of(tmp_path, input={"path": "hf://datasets/no/such/x.parquet"})
    told(refusal(job, tmp_path), "hf://datasets/no/such/x.parquet")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["fingerprint", "files"], None),
        (["fingerprint", "files", 0, "digest"], 7),
        (["fingerprint", "limit"], "x"),
        (["fingerprint", "sampling"], []),
        (["engine"], "x"),
        (["engine", "model"], None),
        (["engine", "max_running"], "x"),
        (["job", "engine"], 3),
        (["job", "limits"], {"max_failed_rows": "x"}),
        (["rows_total"], "x"),
        (["versions"], [1]),
    ],
)
def test_an_edited_run_json(tmp_path: Path, path: list[Any], value: object) -> None:
    """The file and the field are named, by every command, and nothing is changed."""
    job = job_of(tmp_path)
    batchrunner.run(job)
    run = tmp_path / "run"
    facts = json.loads((run / "run.json").read_text())
    place = facts
    for step in path[:-1]:
        place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
    place[path[-1]] = value
    (run / "run.json").write_text(json.dumps(facts))
    file = write_job(job, tmp_path)
    for command in (["status", run], ["report", run], ["check", file], ["run", file]):
        result = batchrun(*command)
        assert result.exit_code == 2, result.exception
        told(result.stderr, run / "run.json", "not a run file of this version", str(path[-1]))
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"engine": -1},
        {"rows_total": []},
        {"signals": 7},
        {"retractions": None},
        {"time": 1e308},
        {"event": None},
    ],
)
def test_damaged_events_are_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    """A line of the log with a value of a wrong type counts as one that was torn."""
    batchrunner.run(job_of(tmp_path))
    log = tmp_path / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    damaged = [{**event, **damage} for event in events] + [{"event": "sample", "time": 5}]
    log.write_text("".join(json.dumps(event) + "\n" for event in [*damaged, *events]))
    for command in ("status", "report", "advise", "merge"):
        result = batchrun(command, tmp_path / "run")
        assert result.exit_code == 0, result.exception


def test_report_names_the_damaged_part(tmp_path: Path) -> None:
    """The line has the file and the reason, whichever of its columns is damaged."""
    batchrunner.run(job_of(tmp_path))
    (part,) = (tmp_path / "run" / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[8 : len(content) // 3] = b"\xff" * (len(content) // 3 - 8)
    part.write_bytes(content)
    result = batchrun("report", tmp_path / "run")
    assert result.exit_code == 2
    told(result.stderr, f"{part}: is damaged", "(")
