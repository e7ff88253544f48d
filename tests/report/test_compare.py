"""`batchrun report RUN RUN …`: figures, settings and answers of several runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import batchrunner
from tests.conftest import batchrun, job_of, printed
from tests.e2e.test_checked_answers import says
from tests.support.answers import Body
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent


def two_runs(directory: Path, server: FakeSGLang, **changes: Any) -> list[Path]:
    """Run a job of ten rows twice; the second run has other answers, another failure and a warm sampling."""
    job = job_of(directory, server, limits={"max_failed_rows": 2})
    server.script = lambda sent: "too long" if sent.row in {3, 5} else says(sent, "alike")
    batchrunner.run(job)

    def script(sent: Sent) -> Behaviour | Body:
        if sent.row in {4, 5}:
            return "too long"
        return says(sent, "\x1b[2J other" if sent.row in {7, 8} else "alike")

    server.script = script
    warm = {**job, "output": {"path": str(directory / "warm")}, "sampling": {"temperature": 0.5}, **changes}
    batchrunner.run(warm)
    return [directory / "run", directory / "warm"]


def test_figures_settings_and_answers(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows are compared by position: the same, different, and failed in one run or in both."""
    runs = two_runs(tmp_path, server)
    compared = printed("report", *runs)
    assert [run["rows_failed"] for run in compared["runs"]] == [2, 2]
    assert compared["settings"]["sampling.temperature"] == [None, 0.5]
    assert not any(name.startswith(("output.", "versions.", "engine.")) for name in compared["settings"])
    (answers,) = compared["answers"]
    assert {name: answers[name] for name in ("rows", "same", "different", "failed_in_both")} == {
        "rows": 10, "same": 5, "different": 2, "failed_in_both": 1
    }  # fmt: skip
    assert (answers["failed_in_first_only"], answers["failed_in_second_only"]) == (1, 1)
    assert answers["examples"][0] == {"row": 7, "first": "alike", "second": "\x1b[2J other"}

    text = batchrun("report", *runs).stdout.splitlines()
    assert text[0].split() == [str(run) for run in runs]
    assert ["rows_failed", "2", "2"] in [line.split() for line in text]
    assert ["sampling.temperature", "unset", "0.5"] in [line.split() for line in text]
    assert any(line.startswith(f"failed in {runs[1]}: 2 rows: ") for line in text)
    assert text[-2] == 'row 7: "alike" / "\\u001b[2J other"'


def test_answers_that_cannot_be_compared(tmp_path: Path, server: FakeSGLang) -> None:
    """Another input, and a run without outputs, are named instead of compared."""
    first, second = two_runs(tmp_path, server)
    (tmp_path / "other").mkdir()
    other = job_of(tmp_path / "other", server, rows=7)
    server.script = lambda sent: says(sent, "alike")
    batchrunner.run(other)
    compared = printed("report", first, second, tmp_path / "other" / "run")
    assert [pair["not_compared"] for pair in compared["answers"]] == [
        None, "the runs have different input files"
    ]  # fmt: skip
    assert [run["rows_total"] for run in compared["runs"]] == [10, 10, 7]
    told = batchrun("report", first, tmp_path / "nothing")
    assert (told.exit_code, "not a run's output path" in told.stderr) == (2, True), told.stderr


def test_rows_with_several_results(tmp_path: Path, server: FakeSGLang) -> None:
    """A row of several rollouts counts as one row, whatever the number of its results in each run."""

    def rollout_of(results: int) -> Callable[..., Any]:
        async def solve(row: dict[str, Any], generate: Any) -> list[dict[str, int]]:
            await generate(f"row {row['id']}")
            return [{"number": number} for number in range(results)]

        return solve

    runs = []
    for name, results in (("first", 3), ("second", 2)):
        server.script = lambda sent, name=name: says(sent, name if sent.row in {1, 2} else "alike")  # type: ignore[misc]
        runs.append(tmp_path / name)
        prompt = {"rollout": rollout_of(results)}
        batchrunner.run(job_of(tmp_path, server, prompt=prompt, output={"path": str(runs[-1])}))
    (answers,) = printed("report", *runs)["answers"]
    assert [answers[name] for name in ("rows", "same", "different")] == [10, 8, 2]
    assert answers["examples"] == [
        {"row": 1, "first": "first", "second": "second"},
        {"row": 2, "first": "first", "second": "second"},
    ]
