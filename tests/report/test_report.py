"""The report of a run: report.json, the lines at its end, and the merged report."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.report.report import Report, report_of_all
from tests.conftest import (
    batchrun,
    job_of,
    report_of,
    write_job,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.page import page_of
from tests.support.runs import status_of


def test_report(tmp_path: Path, server: FakeSGLang) -> None:
    """report.json has the documented fields, and equals the returned report."""
    server.script = lambda sent: "too long" if sent.prompt in {"row 3", "row 4"} else "answer"
    job = job_of(tmp_path, server, limits={"max_failed_rows": 2})
    report = batchrunner.run(job)
    saved = report_of(job)
    assert saved == json.loads(json.dumps(report.as_dict(), default=str))
    expected = {
        "rows_total": 10,
        "rows_ok": 8,
        "rows_failed": 2,
        "rows_resumed": 0,
        "output_tokens": 40,
        "prompt_tokens": 16,
        "cached_tokens": 8,
        "retries": 0,
        "exit_code": 0,
        "starts": 1,
        "finish_reasons": {"stop": 8},
        "simulated": False,
    }
    assert {name: saved[name] for name in expected} == expected
    (group,) = saved["failures"]
    assert group["rows"] == 2
    assert "longer than the model's context length" in group["example"]
    assert saved["wall_s"] > 0
    assert saved["output_tokens_per_s"] == pytest.approx(40 / saved["wall_s"], rel=0.1)
    assert saved["engine"]["model"] == "fake/model"
    assert saved["versions"]["engine"] == "0.5.23"


@pytest.mark.parametrize(
    ("exit_code", "left"),
    [
        (0, "6 left to other workers"),
        (3, "6 left to other workers"),
        (1, "6 left: run the same command again"),
    ],
)
def test_who_does_the_rows_that_are_left(exit_code: int, left: str) -> None:
    """Remaining rows belong to living workers if this one is done, so no line says to run it again."""
    report = batchrunner.Report(
        path="out", exit_code=exit_code, reason="done", rows_total=10, rows_ok=3, rows_failed=1
    )
    assert report.lines()[0].endswith(left)


@pytest.mark.parametrize("samples", [1, 3])
def test_cut_answers_are_counted_wherever_rows_are(tmp_path: Path, server: FakeSGLang, samples: int) -> None:
    """A truncated answer counts as ok and as cut, also in later starts."""
    if samples > 1:
        engine: Any = {"kind": "simulated", "step_s": 0}
        job = job_of(tmp_path, engine, rows=10, sampling={"n": samples, "max_new_tokens": 1})
        cut = 10
    else:
        server.script = lambda sent: "thought" if sent.row < 4 else "answer"
        job = job_of(tmp_path, server, rows=10, prompt={"user": "{{ text }}"})
        cut = 4
    batchrunner.run(job, overrides=["input.limit=5"])
    result = batchrun(write_job(job, tmp_path))
    assert f"10 of 10 rows ok ({cut} truncated at max_new_tokens), 0 failed" in result.stderr
    assert report_of(job)["rows_cut"] == cut
    lines = 1 if samples == 1 else 2  # of rows, then of outputs
    assert result.stderr.count("truncated at max_new_tokens") == lines
    run = tmp_path / "run"
    assert f"{cut} truncated at max_new_tokens" in batchrun("status", run).stdout
    assert status_of(run)["rows_cut"] == cut
    assert f"({cut} truncated at max_new_tokens)" in batchrun("merge", run).stderr
    assert f"Truncated {cut} of these rows" in page_of(run).text


def test_there_is_one_next_step(tmp_path: Path, server: FakeSGLang) -> None:
    """A reason that names the next step gets no further hint on the screen, in `status` and on the page."""
    server.script = lambda _: "too long"
    result = batchrun(write_job(job_of(tmp_path, server, rows=3000, window=4), tmp_path))
    assert result.exit_code == 1
    told = [result.stderr, batchrun("status", tmp_path / "run").stdout, page_of(tmp_path / "run").text]
    for text in told:
        assert "run again with --retry-failed" in text
        assert "--fresh" not in text
        assert "same command again" not in text.lower()
    # the commonest causes, with counts
    assert re.search(r"failed: \d+ rows: 400: The input \(6001 tokens\) is longer", told[1])


def test_what_to_look_at_next() -> None:
    """The end of a run names the commands for its page and for advice."""
    shows = "batchrun report 'out/my run' shows the run"
    assert (
        Report("out/my run", wall_s=1).lines()[-2]
        == f"{shows}, batchrun advise 'out/my run' judges SGLang's flags"
    )
    assert Report("out/my run", wall_s=1, simulated=True).lines()[-2] == shows


def test_pauses_between_starts_are_no_run_time(tmp_path: Path) -> None:
    """`merge` counts the time during which the run worked, without the pause before its second start."""
    job = job_of(tmp_path)
    batchrunner.run(job, overrides=["input.limit=5"])
    log = tmp_path / "run" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    earlier = [{**event, "time": event["time"] - 86400} for event in events]
    log.write_text("".join(json.dumps(event, separators=(",", ":")) + "\n" for event in earlier))
    batchrunner.run(job)
    assert batchrun("merge", tmp_path / "run").exit_code == 0
    report = report_of_all(tmp_path / "run")
    assert report.starts == 2
    assert 0 < report.wall_s < 3600
