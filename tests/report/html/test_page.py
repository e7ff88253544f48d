"""The page of a run shows its files, whatever their content, and does not disturb the run."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

import batchrunner
from batchrunner.output.run_dir import RunDir
from batchrunner.report.html.results import read_results
from tests.conftest import batchrun, eventually, job_of, run_job, started, write_job, write_rows
from tests.support.answers import REFUSALS, Body
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.functions import write_module
from tests.support.page import HOSTILE, page_of, sample


def test_the_page_of_a_run(tmp_path: Path) -> None:
    """`batchrun report` writes the page beside report.json; a run alone does not."""
    with FakeSGLang(lambda sent: "too long" if sent.prompt == "row 7" else "answer", delay_s=0.05) as server:
        job = job_of(tmp_path, server, rows=200, limits={"max_failed_rows": 1})
        batchrunner.run(job)
    run = tmp_path / "run"
    assert not (run / "report.html").exists()
    written = batchrun("report", run)
    assert written.stdout.strip() == str(run / "report.html")
    page = page_of(run)
    assert "199 ok 1 failed, 0 left of 200" in page.text
    assert "The input (6001 tokens) is longer" in page.text
    assert {"Waiting requests, #queue-req", "Token usage", "Outputs, tokens"} <= set(page.texts)


def test_it_is_opened_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--open` hands the page to the browser, and nothing else does."""
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    batchrunner.run(job_of(tmp_path))
    assert batchrun("report", tmp_path / "run").exit_code == 0
    assert opened == []
    assert batchrun("report", tmp_path / "run", "--open").exit_code == 0
    assert opened == [str(tmp_path / "run" / "report.html")]


def test_hostile_texts_are_shown_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that look like HTML, or are a megabyte long, are shown escaped and shortened."""
    monkeypatch.setitem(REFUSALS, "too long", (400, HOSTILE + "x" * 1_000_000))
    name = "<img src=x onerror=alert(2)> & 'run'[1]*"
    write_rows(
        tmp_path / "input.parquet", 4, title=[HOSTILE, "x" * 1_000_000, None, "\U0001f600\u3000\u200d"]
    )

    def script(sent: Sent) -> Behaviour:
        return "answer" if "3" in sent.prompt else "too long"

    with FakeSGLang(script, arguments={"version": "0.5\x00\x1b[31m\u202e"}) as server:
        job = job_of(tmp_path, server, limits={"max_failed_rows": 4})
        job["input"]["columns"] = ["title"]
        job["prompt"] = {"user": "{{ title }} row {{ id }}"}
        job["output"]["path"] = str(tmp_path / name)
        batchrunner.run(job)
    page = page_of(tmp_path / name)
    assert page.opened.count("script") == 2
    assert "img" not in page.opened
    assert page.fetched == ["data:,"]
    assert HOSTILE[:25] in page.text
    assert name in page.text
    assert page.text.count("0.5\\u0000\\u001b[31m\\u202e") == 2
    text = (tmp_path / name / "report.html").read_text(encoding="utf-8")
    assert not set(text) & {"\x00", "\x1b", "\u202e"}
    assert "\U0001f600\u3000\u200d" in text
    assert len(text) < 200_000


def test_values_that_python_cannot_hold(tmp_path: Path) -> None:
    """A carried date out of Python's range appears as a text."""
    late = pa.array([253402300799, 0], pa.timestamp("s", "Asia/Tokyo"))  # 9999-12-31 23:59:59 in UTC
    write_rows(tmp_path / "input.parquet", 2, late=late, far=pa.array([2**31 - 1, 0], pa.date32()))
    batchrunner.run(job_of(tmp_path, input={"columns": ["id", "late", "far"]}))
    page = page_of(tmp_path / "run")
    assert page.text.count("unreadable value: ") == 2
    assert "1970-01-01 09:00:00+09:00" in page.text
    assert batchrun("report", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("what", ["nothing", "no run", "damaged part", "name of no characters"])
def test_not_a_run(tmp_path: Path, what: str) -> None:
    """A run that cannot be shown is refused in one line."""
    run = tmp_path / "run"
    if what == "no run":
        run.mkdir()
    elif what == "damaged part":
        batchrunner.run(job_of(tmp_path))
        next((run / "parts").glob("*")).write_bytes(b"PAR1 no, this is not it PAR1")
    elif what == "name of no characters":
        batchrunner.run(job_of(tmp_path))
        run = run.rename(tmp_path / "run\udce9")
    refused = batchrun("report", run)
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert str(tmp_path / "run") in refused.stderr


def test_a_run_that_goes_on_and_is_killed(tmp_path: Path) -> None:
    """A run has a page while it is at work, after a kill, and after its end."""
    with FakeSGLang(lambda sent: "answer" if sent.row < 50 else "hold") as server:
        file = write_job(job_of(tmp_path, server, rows=60), tmp_path)
        with started(file) as run:
            eventually(lambda: list((tmp_path / "run" / "tasks" / "main").glob("journal-*")))
            eventually(lambda: "50 ok" in shown(tmp_path / "run"))
            assert "running" in shown(tmp_path / "run")
            run.process.kill()
            run.process.wait()
            killed = shown(tmp_path / "run")
        assert "not finished" in killed
        assert "The run's log has no end" in killed
        assert "50 ok 0 failed, 10 left of 60" in killed
        server.answer_held()
        assert batchrun(file).exit_code == 0
    assert "60 ok 0 failed, 0 left of 60" in page_of(tmp_path / "run").text
    assert "2 attempts" in page_of(tmp_path / "run").text


def shown(run: Path) -> str:
    """Return the text of the current page of a run."""
    return page_of(run).text


def test_a_run_of_tasks(tmp_path: Path) -> None:
    """The page has all rows and the schedulers of each task."""
    run = tmp_path / "run"
    with FakeSGLang(max_running=32, delay_s=0.15) as server:
        file = write_job(job_of(tmp_path, server, rows=1500), tmp_path)
        with started(file, "-q", "--join") as other:
            eventually(lambda: [*run.glob("leases/*.0")])
            assert batchrun(file, "-q", "--join").exit_code == 0
            assert other.end() == 0
    tasks = sorted((run / "tasks").glob("join-*"))
    whole = page_of(run)
    assert "1,500 ok 0 failed, 0 left of 1,500" in whole.text
    assert "2 attempts of 2 workers" in whole.text
    assert sum(text.startswith(f"{tasks[1].name} 127.0.0.1") for text in whole.texts) >= 3


def test_lengths_are_those_of_every_row(tmp_path: Path) -> None:
    """The page has their mean, median, percentiles and maximum."""
    texts = [*(" ".join(["word"] * (1 + at % 100)) for at in range(299)), "word " * 100_000]
    write_rows(tmp_path / "input.parquet", 300, text=texts)
    with FakeSGLang() as server:
        batchrunner.run(job_of(tmp_path, server))
    name, unit, mean, median, *_, largest = read_results([RunDir(tmp_path / "run")]).lengths[0]
    assert (name, unit, largest) == ("Prompts", "tokens", 100_000)
    assert (mean, median) == (pytest.approx(383, abs=2), pytest.approx(50, abs=2))
    titles = "Mean Median 90th percentile 99th percentile Maximum Prompts, tokens"
    assert titles in page_of(tmp_path / "run").text


@pytest.mark.parametrize(
    ("reported", "label"), [(True, "no request 3, stop 2"), (False, "no request 3, not reported 2")]
)
def test_why_outputs_ended(tmp_path: Path, label: str, *, reported: bool) -> None:
    """Rollouts without requests, and answers without a finish reason, have finish reasons of their own."""
    write_module(
        tmp_path,
        """
        async def solve(row, generate):
            if row["id"] > 1:
                return {"answer": "known"}
            return {"answer": (await generate(row["text"])).text}
        """,
    )
    without_reason = Body(b'{"text": "fine", "meta_info": {"prompt_tokens": 3, "completion_tokens": 2}}')
    with FakeSGLang(lambda _: "answer" if reported else without_reason) as server:
        run_job(job_of(tmp_path, server, rows=5, prompt={"rollout": "hooks:solve"}), tmp_path)
    assert f"Why outputs ended: {label}." in page_of(tmp_path / "run").text


def test_what_to_change_is_said(tmp_path: Path) -> None:
    """The page of a run has the advice of `batchrun advise`."""
    with FakeSGLang() as server:
        batchrunner.run(job_of(tmp_path, server))
    run = tmp_path / "run"
    load = {
        "in_flight": 40,
        "window": 40,
        "rows_total": 9000,
        "rows_done": 10,
        "unsent": 8950,
        "retractions": 0,
        "output_tokens_per_s": 99,
    }
    samples = [sample(2e9 + 2 * at, queue=30, **load) for at in range(100)]
    log = (run / "events.jsonl").read_text()
    told = "".join(json.dumps(one) + "\n" for one in samples)
    (run / "events.jsonl").write_text(log + "".join(told.splitlines(keepends=True)[:3]))
    assert "Too short for advice: " in shown(run)
    assert "; advice needs 8 samples over 10 s" in shown(run)
    (run / "events.jsonl").write_text(log + told.replace('"token_usage": 0.5', '"token_usage": 0.95'))
    assert "healthy: median #running-req 8, #queue-req 30" in shown(run)
    (run / "events.jsonl").write_text(log + told)
    assert "--schedule-conservativeness" in shown(run)
    assert "--schedule-conservativeness" in batchrun("advise", run).stdout
