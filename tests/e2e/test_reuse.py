"""A new run takes the answers of equal requests from an earlier one (`output.reuse`)."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError, JobError, ResumeError, StorageError
from batchrunner.output.parts import write_part
from tests.conftest import batchrun, column_of, job_of, results_of, rows_in, run_job, write_rows
from tests.support.answers import Body, Said
from tests.support.fake_sglang import FakeSGLang, Sent, answer
from tests.support.functions import LABEL, write_module
from tests.support.refusals import refusal, told
from tests.support.runs import failed_rows, rows_once, rows_sent, status_of
from tests.support.store_server import StoreBucket

NOW = "{{ text }}{% if id % 6 == 0 %} now{% endif %}"
"""A template that is corrected for 7 of 40 rows."""
CORRECTED = [row for row in range(40) if row % 6 == 0]


JUDGE = """
LEAST = 1

def is_good(answer):
    return len(answer) > LEAST
"""


def both(directory: Path, server: Any, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job, and the same into another directory, which takes the answers of the first."""
    old = job_of(directory, server, rows=40, **changes)
    path = old["output"]["path"]
    return old, {**old, "output": {**old["output"], "path": f"{directory}/new", "reuse": path}}


def answers(job: dict[str, Any]) -> dict[int, Any]:
    return {row["row"]: row["output"] for row in results_of(job)}


@pytest.mark.parametrize("options", [[], ["--join"]], ids=["alone", "join"])
def test_a_corrected_template(tmp_path: Path, server: FakeSGLang, options: list[str]) -> None:
    """Only the rows whose prompts are others are sent; what was taken is counted, wherever rows are."""
    old, new = both(tmp_path, server, input={"columns": ["id"]}, order="prefix")
    new["prompt"] = {"text": NOW}
    run_job(old, tmp_path)
    server.forget()
    result = run_job(new, tmp_path, *options)
    told(result.stderr, f"33 of 40 rows have the answer of an equal request in {tmp_path}/run")
    assert rows_sent(server) == CORRECTED
    found, before = answers(new), answers(old)
    assert {row for row in found if found[row] == before[row]} == {*range(40)} - {*CORRECTED}
    assert column_of(new, "id") == list(range(40))
    told(batchrun("status", tmp_path / "new").stdout, "40 of 40 rows on disk (100.0%), 33 reused, 0 failed")
    server.forget()
    assert batchrun("merge", tmp_path / "new").exit_code == 0
    merged = pq.read_table(tmp_path / "new" / "merged")
    assert merged.column("row").to_pylist() == list(range(40))
    assert "request_digest" not in merged.schema.names
    again = batchrunner.run({**new, "output": {"path": new["output"]["path"]}}, join=bool(options))
    assert (again.rows_ok, again.exit_code, server.sent) == (40, 0, [])


def test_what_the_report_says(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that were taken are no tokens, no duplicates, and no rows of an earlier start."""
    old, new = both(tmp_path, server)
    new["prompt"] = {"text": NOW}
    first = batchrunner.run(old)
    report = batchrunner.run(new)
    assert (report.rows_reused, report.rows_resumed, report.rows_deduplicated) == (33, 0, 0)
    assert 0 < report.output_tokens < first.output_tokens / 4
    assert "33 rows got an answer of another run" in report.lines()
    later = batchrunner.run(new)
    assert (later.rows_reused, later.rows_resumed) == (33, 40)
    assert batchrunner.run(new, fresh=True).rows_reused == 33
    third = {**new, "output": {"path": f"{tmp_path}/third", "reuse": f"{tmp_path}/new"}}
    assert batchrunner.run(third).rows_reused == 40


def test_another_order_and_other_columns(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows are known by what they ask for, wherever they stand; carried columns are the new input's."""
    old, new = both(tmp_path, server, input={"columns": ["id"]})
    batchrunner.run(old)
    rows = list(reversed(range(50)))
    table = {"text": [f"row {row}" for row in rows], "id": rows, "name": rows}
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    new["input"] = {"path": f"{tmp_path}/b.parquet", "columns": ["name"], "filter": "id != 7"}
    server.forget()
    report = batchrunner.run(new)
    assert (report.rows_ok, report.rows_reused, len(server.sent)) == (49, 39, 10)
    found = {row["name"]: row["output"] for row in results_of(new)}
    assert found.items() >= {row: text for row, text in answers(old).items() if row != 7}.items()


@pytest.mark.parametrize("on_length", ["keep", "longer"])
def test_only_good_answers(tmp_path: Path, server: FakeSGLang, on_length: str) -> None:
    """A failed row is asked again, and one that was cut where the job asks such rows again."""

    def script(sent: Sent) -> Any:
        cut = answer(sent, "so far")
        cut["meta_info"]["finish_reason"] = {"type": "length", "length": 2}
        return {3: "too long", 5: Body(json.dumps(cut).encode())}.get(sent.row, "answer")

    server.script = script
    old, new = both(tmp_path, server)
    batchrunner.run(old)
    server.script = lambda _: "answer"
    server.forget()
    report = batchrunner.run({**new, "on_length": on_length})
    again = [3, 5] if on_length == "longer" else [3]
    assert (rows_sent(server), report.rows_reused, report.rows_ok) == (again, 40 - len(again), 40)


@pytest.mark.parametrize("change", ["sampling.temperature=0.5", "output.columns=[output_ids]"])
def test_other_requests(tmp_path: Path, server: FakeSGLang, change: str) -> None:
    """Sampling and what is asked for belong to a request; that nothing is equal is said."""
    old, new = both(tmp_path, server)
    batchrunner.run(old)
    server.forget()
    report = batchrunner.run(new, overrides=[change])
    assert (report.rows_reused, report.rows_ok, len(server.sent)) == (0, 40, 40)


REFUSED = {
    "accept.regex=row": "accept.regex was unset and is 'row'",
    "prompt.truncate=head": "prompt.truncate was unset and is 'head'",
    "task=embed": "task was 'generate' and is 'embed'",
}


@pytest.mark.parametrize("change", REFUSED)
def test_answers_that_cannot_fit(tmp_path: Path, server: FakeSGLang, change: str) -> None:
    """One line tells what differs, and nothing is sent or written."""
    old, new = both(tmp_path, server)
    batchrunner.run(old)
    server.forget()
    with pytest.raises(JobError, match=r"output\.reuse: .*/run: ") as caught:
        batchrunner.run(new, overrides=[change])
    told(str(caught.value), REFUSED[change])
    assert not server.sent
    assert not (tmp_path / "new").exists()


def test_paths_that_are_no_other_run(tmp_path: Path, server: FakeSGLang) -> None:
    """One line each."""
    old, new = both(tmp_path, server)
    new["output"]["reuse"] = f"{tmp_path}/nothing"
    told(refusal(new, tmp_path), f"{tmp_path}/nothing: not a run's output path")
    batchrunner.run(old)
    old["output"]["reuse"] = old["output"]["path"]
    told(refusal(old, tmp_path, "--fresh", "--set", "window=3"), "is the output path of this job itself")


def test_another_model(tmp_path: Path, server: FakeSGLang) -> None:
    """A server tells its model only when it is there: then the run is refused before a row is sent."""
    old, new = both(tmp_path, server)
    batchrunner.run(old)
    new["prompt"] = {"text": NOW}
    with FakeSGLang(model="other/model") as other:
        with pytest.raises(ResumeError, match="model was 'fake/model' and is 'other/model'"):
            batchrunner.run({**new, "engine": other.url})
        assert not other.sent
    assert batchrunner.run(new).rows_ok == 40


def test_no_engine_is_needed_where_all_is_known(tmp_path: Path, server: FakeSGLang) -> None:
    """Another column to carry costs no row, and columns of `parse` are made again."""
    write_module(tmp_path, LABEL)
    old, new = both(tmp_path, server, parse="hooks:label", python_path=[str(tmp_path)])
    batchrunner.run(old)
    gone = {**new, "engine": "http://127.0.0.1:9", "input": {**old["input"], "columns": ["id"]}}
    report = batchrunner.run(gone)
    assert (report.exit_code, report.rows_ok, report.rows_reused) == (0, 40, 40)
    assert all((row["id"], row["length"]) == (row["row"], len(row["output"])) for row in results_of(new))


@pytest.mark.parametrize("samples", [1, 2])
def test_a_corrected_parse(tmp_path: Path, server: FakeSGLang, samples: int) -> None:
    """Columns are made again of reused answers, with the row; an answer that cannot be parsed fails alone."""
    write_module(tmp_path, LABEL)
    changes = {"sampling": {"n": samples, "temperature": 1}, "limits": {"max_failed_rows": 1}}
    old, new = both(
        tmp_path,
        server,
        parse="hooks:label",
        python_path=[str(tmp_path)],
        input={"columns": ["id"]},
        **changes,
    )
    batchrunner.run(old)
    corrected = LABEL.replace("label(answer)", "label(answer, row)").replace("length: int", "length: float")
    corrected = corrected.replace("len(answer)", "row['id'] + 1 / (7 - row['id'])")
    write_module(tmp_path, corrected)
    report = batchrunner.run({**new, "engine": "http://127.0.0.1:9"})
    assert (report.exit_code, report.rows_ok, report.rows_failed, report.rows_reused) == (0, 39, 1, 40)
    before = answers(old)
    for row in results_of(new):
        number = row["row"]
        assert row["output"] == before[number]
        if number == 7:
            assert row["length"] is None
            told(row["error"], "hooks.py:", "ZeroDivisionError")
        else:
            length = number + 1 / (7 - number)
            assert row["length"] == (length if samples == 1 else [length] * samples)


def test_a_corrected_judge(tmp_path: Path, server: FakeSGLang) -> None:
    """Answers that older code of `accept.python` judged good are not taken; a comment changes nothing."""
    write_module(tmp_path, JUDGE, "judge")
    checks = {"accept": {"python": "judge:is_good"}, "python_path": [str(tmp_path)]}
    old, new = both(tmp_path, server, **checks)
    batchrunner.run(old)
    write_module(tmp_path, JUDGE.replace("LEAST = 1", "LEAST = 2"), "judge")
    with pytest.raises(JobError, match=r"/run: the code of accept\.python has changed since"):
        batchrunner.run(new)
    write_module(tmp_path, "# what is good\n" + JUDGE, "judge")
    assert batchrunner.run(new).rows_reused == 40


@pytest.mark.parametrize("temperature", [0, 1])
def test_equal_rows(tmp_path: Path, server: FakeSGLang, temperature: int) -> None:
    """Samples stay samples: each row has one of its own. At temperature 0 all share one."""
    numbers = iter(range(100))
    server.script = lambda _: Said(f"answer {next(numbers)}")

    def write(rows: int) -> None:
        pq.write_table(pa.table({"text": ["row 1"] * rows}), tmp_path / "a.parquet")

    write(3)
    changes = {"sampling": {"temperature": temperature}, "input": {"path": f"{tmp_path}/a.parquet"}}
    old, new = both(tmp_path, server, **changes)
    batchrunner.run(old)
    write(5)
    server.forget()
    report = batchrunner.run(new)
    found = column_of(new, "output")
    assert found[:3] == column_of(old, "output")
    assert (report.rows_reused, len({*found})) == ((3, 5) if temperature else (5, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"n": 2, "temperature": 1}, "output": {"columns": ["output_ids", "logprobs"]}},
        {"prompt": {"user": "{{ text }}"}, "accept": {"json": {"type": "object"}, "tries": 1}},
        {"task": "embed", "output": {"dtype": "float16"}},
    ],
    ids=["samples", "json", "vectors"],
)
def test_all_that_an_answer_has(tmp_path: Path, server: FakeSGLang, changes: dict[str, Any]) -> None:
    """Lists, structs and vectors are in the new parts as they were in the old ones, of the same types."""
    if "accept" in changes:
        server.script = lambda _: Said('{"a": [1, 2], "b": null}')
    if changes.get("task") == "embed":
        server.arguments = {"is_generation": False}
    old, new = both(tmp_path, server, **changes)
    batchrunner.run(old)
    server.forget()
    assert batchrunner.run(new).rows_reused == 40
    assert not server.sent
    one, other = (pq.read_table(Path(job["output"]["path"]) / "parts").sort_by("row") for job in (old, new))
    apart = ["latency_s", "attempts"]
    assert one.drop_columns(apart).equals(other.drop_columns(apart))


def test_few_parts_of_many_answers(tmp_path: Path, server: FakeSGLang) -> None:
    """Reused answers fill their parts, however small the row groups are in which the input is read."""
    old = job_of(tmp_path, server)
    for first in range(0, 900, 90):
        write_rows(tmp_path / "docs" / f"{first:03}.parquet", 90, first)
    old["input"]["path"] = str(tmp_path / "docs")
    batchrunner.run(old)
    new = old | {"output": {"path": str(tmp_path / "new"), "reuse": str(tmp_path / "run"), "part_rows": 400}}
    assert batchrunner.run(new).rows_reused == 900
    parts = sorted((tmp_path / "new" / "parts").iterdir())
    assert len(parts) <= 4
    assert max(pq.read_metadata(part).num_rows for part in parts) <= 400


def test_a_stop_in_between(tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken by then is kept; the next start takes the rest, and each row has its answer once."""
    old, new = both(tmp_path, server, sampling={"temperature": 1})
    new["prompt"] = {"text": NOW}
    new["output"] = {**new["output"], "part_rows": 10}
    batchrunner.run(old)
    server.forget()
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        failing = Mock(wraps=write_part, side_effect=[DEFAULT, DEFAULT, full])
        patch.setattr("batchrunner.runner.reuse.write_part", failing)
        with pytest.raises(StorageError, match="No space left"):
            batchrunner.run(new)
    assert len(rows_in(new)) == 20
    report = batchrunner.run(new)
    assert (report.rows_resumed, report.rows_reused) == (20, 33)
    assert rows_sent(server) == CORRECTED
    rows_once(new, 40)
    before = answers(old)
    assert all(text == before[row] for row, text in answers(new).items() if row not in CORRECTED)
    assert not list((tmp_path / "new").rglob("*reuse*"))


def test_runs_in_stores(tmp_path: Path, store_bucket: StoreBucket, server: FakeSGLang) -> None:
    """Both may lie in a store, or one of them."""
    old, new = both(tmp_path, server)
    old["output"] = {"path": f"{store_bucket.uri}/old"}
    batchrunner.run(old)
    new["prompt"] = {"text": NOW}
    for path in (f"{store_bucket.uri}/new", f"{tmp_path}/new"):
        job = {**new, "output": {"path": path, "reuse": f"{store_bucket.uri}/old"}}
        assert batchrunner.run(job).rows_reused == 33


def test_rows_of_a_file_that_grew(tmp_path: Path, server: FakeSGLang) -> None:
    """A run that goes on takes the answers for its new rows, too."""
    path = tmp_path / "a.csv"
    path.write_text("text\nrow 0\nrow 1\nrow 2\nrow 3\n")
    old, new = both(tmp_path, server, input={"path": str(path)})
    batchrunner.run(old)
    path.write_text("text\nrow 0\nrow 1\n")
    assert batchrunner.run(new).rows_reused == 2
    path.write_text("text\nrow 0\nrow 1\nrow 3\nrow 2\nrow 9\n")
    server.forget()
    report = batchrunner.run(new)
    assert (report.rows_reused, report.rows_ok, rows_sent(server)) == (4, 5, [9])


@pytest.mark.parametrize("retry", [False, True])
def test_a_fresh_start(tmp_path: Path, server: FakeSGLang, *, retry: bool) -> None:
    """`--fresh` discards what is there before answers are taken, also beside `--retry-failed`."""
    old, new = both(tmp_path, server)
    batchrunner.run(old)
    batchrunner.run(new)
    report = batchrunner.run(new, fresh=True, retry_failed=retry)
    assert (report.rows_ok, report.rows_reused) == (40, 40)
    rows_once(new, 40)


@pytest.mark.parametrize("option", ["--fresh", "--retry-failed"])
def test_an_engine_that_is_down(tmp_path: Path, server: FakeSGLang, option: str) -> None:
    """A start that discards results and reuses answers changes nothing until its engine is ready."""
    server.script = lambda sent: "too long" if sent.row < 5 else "answer"
    old, new = both(tmp_path, server, limits={"max_failed_rows": 5, "abort_failed_share": 1})
    batchrunner.run({**new, "output": {"path": new["output"]["path"]}})
    server.script = lambda _: "answer"
    batchrunner.run({**old, "input": {**old["input"], "limit": 3}})
    before = status_of(tmp_path / "new")
    with FakeSGLang(model="other/model") as other:
        for engine, problem in (("http://127.0.0.1:9", "no connection"), (other.url, "'other/model'")):
            told(run_job({**new, "engine": engine}, tmp_path, option, code=2).stderr, problem)
            assert status_of(tmp_path / "new") == before
            assert (len(rows_in(new)), len(failed_rows(new))) == (40, 5)
    server.forget()
    run_job(new, tmp_path, option)
    rows_once(new, 40)
    assert failed_rows(new) == []
    assert rows_sent(server) == ([3, 4] if option == "--retry-failed" else list(range(3, 40)))


@pytest.mark.parametrize("options", [[], ["--join"]], ids=["alone", "join"])
def test_failed_rows_take_answers(tmp_path: Path, server: FakeSGLang, options: list[str]) -> None:
    """Where failed rows are tried again, those that another run has an answer for are not sent."""
    server.script = lambda sent: "too long" if sent.row < 5 else "answer"
    limits = {"max_failed_rows": 40, "abort_failed_share": 1}
    old, new = both(tmp_path, server, limits=limits)
    alone = {**new, "output": {"path": new["output"]["path"]}}
    run_job(alone, tmp_path, *options)
    assert len(failed_rows(alone)) == 5
    server.script = lambda sent: "too long" if sent.row == 0 else "answer"
    batchrunner.run(old)
    server.forget()
    run_job(new, tmp_path, "--retry-failed", *options)
    assert rows_sent(server) == [0]
    assert failed_rows(new) == [0]
    assert sorted(rows_in(new)) == list(range(40))
    new["output"]["reuse"] = f"{tmp_path}/nothing"
    told(refusal(new, tmp_path, "--retry-failed"), "not a run's output path")


@pytest.mark.parametrize("join", [False, True], ids=["alone", "join"])
def test_rows_that_are_corrected_after_their_answers_were_taken(
    tmp_path: Path, server: FakeSGLang, *, join: bool
) -> None:
    """A run knows the input that it took answers for, also where it was stopped before it sent a row."""
    source = tmp_path / "in"
    write_rows(source / "a.parquet", 4)
    write_rows(source / "b.parquet", 4, first=4)
    old, new = both(tmp_path, server, input={"path": str(source)})
    batchrunner.run(old)
    (source / "b.parquet").unlink()
    batchrunner.run(new, join=join)
    write_rows(source / "b.parquet", 4, first=4)
    write_rows(source / "c.parquet", 1, first=8)
    with pytest.raises(BatchrunError):
        batchrunner.run(new, overrides=["engine.urls=['http://127.0.0.1:9']"], join=join)
    assert rows_in(new) == list(range(8))
    state = status_of(tmp_path / "new")
    assert (state["rows_on_disk"], state["rows_total"], state["finished"]) == (8, 9, False)
    told(batchrun("merge", tmp_path / "new").stderr, "not finished: 8 of 9 rows ok, 0 failed, 1 left")
    write_rows(source / "b.parquet", 4, first=40)
    refused = refusal(new, tmp_path, *(["--join"] if join else []))
    told(refused, f"the input file {source}/b.parquet changed")
