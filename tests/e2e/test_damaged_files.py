"""Jobs and run directories that are damaged, edited or meant to harm: one line each, and exit code 2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import batchrunner
from tests.conftest import batchrun, job_of, write_job
from tests.support.refusals import refusal, told

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.page
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join(['*' + chr(97 + i)] * 10)}]}}\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIASES, "more than 200,000 values"),
        (MERGES, "more than 200,000 values"),
        ("a: &a [*a]", "an alias stands in itself"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("# " + "x" * (3 << 20), "more than 2 MiB"),
        ("a:\n\tb: 1", "cannot start any token"),
        ("a: \0", "not valid YAML"),
        ("a: 1\na: 2", "given twice"),
    ],
)
def test_yaml_that_is_no_job(tmp_path: Path, text: str, problem: str) -> None:
    """It is refused at once."""
    told(refusal(text, tmp_path), "job.yaml", problem)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_editors_mark_their_encoding(tmp_path: Path, encoding: str) -> None:
    """A job file may begin with a byte order mark."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_of(tmp_path)), encoding=encoding)
    assert batchrun("check", file).exit_code == 0


@pytest.mark.parametrize(
    "sampling",
    [{"regex": "(" * 5000 + ")" * 5000}, {"json_schema": "[" * 100_000}, {"regex": "a{99999999999999}"}],
)
def test_nested_grammars(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """What Python cannot parse is refused with the field, in a short line."""
    message = refusal(job_of(tmp_path, sampling=sampling), tmp_path)
    told(message, f"sampling.{next(iter(sampling))}: not a ")
    assert len(message) < 500


def test_a_store_that_cannot_be_reached(tmp_path: Path) -> None:
    """Packages that open a store raise errors of their own."""
    job = job_of(tmp_path, input={"path": "hf://datasets/no/such/x.parquet"})
    told(refusal(job, tmp_path), "hf://datasets/no/such/x.parquet")


def test_rows_that_no_table_holds() -> None:
    """A number over 64 bits is refused as a row that cannot be sent."""
    with pytest.raises(batchrunner.InputError, match="cannot be made a table: rows 0 to 0"):
        batchrunner.generate([{"text": 10**30}], prompt="{{ text }}", engine={"kind": "simulated"})


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
