"""Checked answers: parsed JSON, conditions, rows asked again, answers that were cut, and their counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    eventually,
    job_of,
    parts_of,
    report_of,
    results_of,
    started,
    write_job,
    write_rows,
)
from tests.support.answers import Body
from tests.support.fake_sglang import FakeSGLang, Sent, answer
from tests.support.functions import HOOKED, check_hooked, write_hooks
from tests.support.runs import status_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.answers import Body
    from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.usefixtures("quick_retries")

CHAT = {"user": "{{ text }}"}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {},
    },
    "required": ["kind"],
}
GOOD = {"kind": "a", "score": 1, "tags": ["x"], "more": {"y": [1]}}


def says(sent: Sent, text: str, reason: str = "stop", **more: Any) -> Body:
    """An answer with a text, from either endpoint."""
    reply = answer(sent, text)
    if sent.path == "/generate":
        samples = reply if isinstance(reply, list) else [reply]
        for sample in samples:
            sample["meta_info"]["finish_reason"] = {"type": reason}
            sample.update(more)
    else:
        for choice in reply["choices"]:
            choice["finish_reason"] = reason
            choice["message"].update(more)
    return Body(json.dumps(reply).encode())


def script(*texts: str) -> Callable[[Sent], Body]:
    """Return a script in which the tries of a row have these texts, the last one from then on."""
    return lambda sent: says(sent, texts[min(sent.tries, len(texts)) - 1])


def sampling_of(sent: Sent) -> dict[str, Any]:
    """Return the sampling parameters of a request."""
    sampling: dict[str, Any] = sent.body.get("sampling_params", sent.body)
    return sampling


def schema_job(directory: Path, server: Any, **changes: Any) -> Any:
    sampling = {"json_schema": SCHEMA, "temperature": 0, **changes.pop("sampling", {})}
    return job_of(directory, server, rows=changes.pop("rows", 1), sampling=sampling, **changes)


def test_an_answer_with_a_schema_is_parsed(tmp_path: Path, server: FakeSGLang) -> None:
    """The column has the schema's type; what Arrow has no type for is JSON text."""
    server.script = script(json.dumps(GOOD))
    job = schema_job(tmp_path, server)
    assert batchrunner.run(job).exit_code == 0
    (part,) = parts_of(tmp_path / "run")
    assert part.schema.field("parsed").type == pa.struct(
        [
            ("kind", pa.string()),
            ("score", pa.float64()),
            ("tags", pa.list_(pa.field("element", pa.string()))),
            ("more", pa.string()),
        ]
    )
    (row,) = results_of(job)
    assert row["parsed"] == {"kind": "a", "score": 1.0, "tags": ["x"], "more": '{"y":[1]}'}
    assert json.loads(row["output"]) == GOOD
    assert batchrun("merge", tmp_path / "run", tmp_path / "all.csv").exit_code == 0
    assert '""kind"":""a""' in (tmp_path / "all.csv").read_text()


NODE = {"properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/n"}}}
BAD = {
    '{"kind": "a", "sco': "the answer is not JSON: ",
    '{"kind": "c"}': 'the answer does not satisfy its schema: [\'kind\'] "c" is not one of "a" or "b"',
    "{}": 'the answer does not satisfy its schema: "kind" is a required property',
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_of_the_schema_fails_its_row(tmp_path: Path, server: FakeSGLang, text: str) -> None:
    """It keeps its answer, and is not asked again, since the job does not say so."""
    server.script = lambda sent: says(sent, text if sent.prompt == "row 1" else json.dumps(GOOD))
    job = schema_job(tmp_path, server, rows=3)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed, len(server.sent)) == (3, 2, 1, 3)
    bad = results_of(job)[1]
    assert bad["error"].startswith(BAD[text])
    assert (bad["output"], bad["parsed"], bad["attempts"]) == (text, None, 1)
    assert report_of(job)["checks"]["rows_failed"] == 1
    later = batchrunner.run(job)
    assert (later.rows_ok, later.rows_failed) == (2, 1)


def test_a_cut_answer_with_a_schema_fails(tmp_path: Path, server: FakeSGLang) -> None:
    server.script = lambda sent: says(sent, json.dumps(GOOD), "length")
    job = schema_job(tmp_path, server)
    batchrunner.run(job)
    assert results_of(job)[0]["error"] == "the answer was cut at max_new_tokens"
    job["on_length"] = "keep"
    assert batchrunner.run(job, fresh=True).exit_code == 0


@pytest.mark.parametrize(
    ("schema", "text", "value", "kind"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"x"', "x", "string"),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
            '{"v": 1, "n": {"v": 2}}',
            {"v": 1, "n": '{"v":2}'},
            "struct<v: int64, n: string>",
        ),
        (True, "1", "1", None),
    ],
)  # fmt: skip
def test_types_of_schemas(
    tmp_path: Path, server: FakeSGLang, schema: Any, text: str, value: Any, kind: str | None
) -> None:
    server.script = script(text)
    given = {"json": schema} if kind is None else {}
    job = job_of(tmp_path, server, rows=1, check=given, output={"columns": ["parsed"]})
    if kind is not None:
        job["sampling"] = {"json_schema": schema}
    assert batchrunner.run(job).exit_code == 0
    assert results_of(job)[0]["parsed"] == value
    assert str(parts_of(tmp_path / "run")[0].schema.field("parsed").type) == (kind or "string")


def test_a_schema_of_each_row(tmp_path: Path, server: FakeSGLang) -> None:
    """Each answer is checked against its own; `parsed` is JSON text. Without a schema any text will do."""
    schemas = ['{"type": "integer"}', '{"type": "string"}', None, "{"]
    write_rows(tmp_path / "input.parquet", 4, schema=schemas)
    server.script = lambda sent: says(sent, "text" if sent.prompt == "row 2" else "5")
    job = job_of(tmp_path, server, sampling={"json_schema": {"column": "schema"}})
    batchrunner.run(job)
    rows = results_of(job)
    assert [row["parsed"] for row in rows] == ["5", None, None, None]
    assert [row["error"] is None for row in rows] == [True, False, True, False]


SLOW, LONG = r"^(?!z)(a|aa)+$", "a" * 50 + "!"
"""An expression that needs a look-ahead, and an answer for which it tries all ways to part the letters."""
ASKED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "fence": (
        {"json": True}, '```json\n{"a": 1}\n```', '{"a": 1}',
        "the answer is not JSON: it has a code fence (```) around it",
    ),
    "schema": ({"json": SCHEMA}, "{}", '{"kind": "a"}', "the answer does not satisfy its schema"),
    "regex": ({"regex": r"^\d+$"}, "no 5", "55", r"the answer has no match of check.regex '^\\d+$'"),
    "slow regex": ({"regex": SLOW}, LONG, "aa", "check.regex"),
    "expression": (
        {"expression": "output | length > id + 1 and finish_reason == 'stop'"}, "x", "xx",
        "check.expression is not true: output | length > id + 1",
    ),
    "no JSON": ({"expression": "parsed.a > 1"}, "x", '{"a": 2}', "check.expression is not true"),
    "odd": ({"expression": "output + 1 > 2"}, "x", "y", "check.expression fails: "),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_that_is_not_good_is_asked_for_again(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """With a new seed and a higher temperature, three times; then it fails with its last answer."""
    check, bad, good, told = ASKED[name]
    server.script = script(bad, bad, good)
    job = job_of(tmp_path, server, rows=1, prompt=CHAT, check=check, sampling={"temperature": 0})
    report = batchrunner.run(job)
    (row,) = results_of(job)
    if name != "odd":
        assert (report.exit_code, row["output"], row["error"], row["attempts"]) == (0, good, None, 3)
        checks = report_of(job)["checks"]
        assert (checks["rows_asked_again"], checks["asked_again"], checks["rows_mended"]) == (1, 2, 1)
        assert checks["causes"][0]["rows"] == 2
        assert checks["output_tokens"] == 2 * len(bad.split())
    assert [sampling_of(sent)["temperature"] for sent in server.sent] == [0, 0.4, 0.8]
    assert len({sent.body.get("seed") for sent in server.sent}) == 3
    server.script = script(bad)
    report = batchrunner.run(job, fresh=True)
    (row,) = results_of(job)
    assert (report.exit_code, row["output"], row["attempts"]) == (3, bad, 3)
    assert row["error"].startswith(told)


@pytest.mark.parametrize(
    ("check", "sampling", "expected"),
    [
        ({"temperature": 0.6}, {}, [None, 0.6, 0.6, 0.6]),
        ({"temperature": 0.6}, {"temperature": 0.1}, [0.1, 0.6, 0.6, 0.6]),
        ({}, {"temperature": 0.7}, [0.7, 0.7, 0.8, 0.8]),
    ],
)
def test_temperatures(
    tmp_path: Path, server: FakeSGLang, check: Any, sampling: Any, expected: list[float | None]
) -> None:
    server.script = script("bad")
    job = job_of(tmp_path, server, rows=1, check={"regex": "good", "tries": 4, **check}, sampling=sampling)
    batchrunner.run(job)
    assert [sampling_of(sent).get("temperature") for sent in server.sent] == expected


def test_a_chat_is_told_what_was_wrong(tmp_path: Path, server: FakeSGLang) -> None:
    """The answer and the complaint stand in the conversation, the last ones only."""
    server.script = lambda sent: says(sent, f"bad {len(server.sent)}")
    job = job_of(tmp_path, server, rows=1, prompt=CHAT, check={"regex": "good", "feedback": True})
    batchrunner.run(job)
    first, second, third = (sent.body["messages"] for sent in server.sent)
    complaint = "This answer is not good: the answer has no match of check.regex 'good'. Answer again."
    for messages, text in ((second, "bad 1"), (third, "bad 2")):
        assert messages == [
            *first, {"role": "assistant", "content": text}, {"role": "user", "content": complaint},
        ]  # fmt: skip


def test_samples_must_all_be_good(tmp_path: Path, server: FakeSGLang) -> None:
    job = job_of(tmp_path, server, rows=1, check={"regex": "^answer [01]"}, sampling={"n": 3})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row["error"].startswith("sample 2: the answer has no match")
    assert len(row["output"]) == 3


def test_equal_rows_are_told_apart_by_what_the_check_reads(tmp_path: Path, server: FakeSGLang) -> None:
    """Two rows with one request share an answer only where the check sees the same in both."""
    pq.write_table(pa.table({"text": ["x"] * 4, "want": ["a", "a", "b", "b"]}), tmp_path / "input.parquet")
    server.script = lambda sent: says(sent, "a")
    check = {"expression": "output == want", "tries": 1}
    job = job_of(tmp_path, server, check=check, sampling={"temperature": 0})
    report = batchrunner.run(job)
    assert [row["error"] is None for row in results_of(job)] == [True, True, False, False]
    assert (report.rows_ok, report.rows_failed, len(server.sent)) == (2, 2, 2)
    assert [row["output"] for row in results_of(job)] == ["a"] * 4


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_cut_answer_is_asked_for_with_more_tokens(
    tmp_path: Path, server: FakeSGLang, *, goes_on: bool
) -> None:
    """Twice as many each time, also with a grammar; the fourth one that is cut fails its row."""
    texts = ['{"ki', '{"kind', '{"kind"', '{"kin' if goes_on else json.dumps(GOOD)]
    server.script = lambda sent: says(
        sent, texts[sent.tries - 1], "length" if goes_on or sent.tries < 4 else "stop"
    )
    job = schema_job(tmp_path, server, on_length="longer", check={"tries": 1}, sampling={"max_new_tokens": 4})
    assert batchrunner.run(job).exit_code == (3 if goes_on else 0)
    assert [sampling_of(sent)["max_new_tokens"] for sent in server.sent] == [4, 8, 16, 32]
    (row,) = results_of(job)
    assert row["output"] == texts[-1]
    assert row["error"] == ("the answer was cut at max_new_tokens" if goes_on else None)
    assert report_of(job)["checks"]["asked_again"] == 3


def test_a_row_that_is_refused_later_keeps_its_answer(tmp_path: Path, server: FakeSGLang) -> None:
    """With more tokens it may be too long for the model."""
    server.script = lambda sent: says(sent, "x", "length") if len(server.sent) == 1 else "too long"
    job = job_of(tmp_path, server, rows=1, on_length="longer")
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row["output"] == "x"
    assert row["error"].startswith("400: The input (6001 tokens)")


def test_the_conditions_do_not_change_within_a_run(tmp_path: Path, server: FakeSGLang) -> None:
    """How often a row is asked may."""
    job = job_of(tmp_path, server, rows=2, check={"regex": "answer"}, input={"limit": 1})
    batchrunner.run(job)
    file = write_job(job, tmp_path)
    refused = batchrun(file, "--set", "check.regex=row")
    assert refused.exit_code == 2
    assert "check.regex was 'answer' and is 'row'" in refused.stderr
    assert batchrun(file, "--set", "check.tries=9", "--set", "input.limit=2").exit_code == 0


async def test_in_the_library(server: FakeSGLang) -> None:
    server.script = script("bad", "5")
    table = batchrunner.generate(["a"], engine=server.url, check={"json": {"type": "integer"}})
    assert table["parsed"].to_pylist() == [5]
    server.forget()
    rows = [row async for row in batchrunner.stream(["a"], engine=server.url, check={"regex": "5"})]
    assert [row["output"] for row in rows] == ["5"]


def test_the_simulated_engine_obeys_schemas(tmp_path: Path) -> None:
    """Its JSON is made up; else no job with a schema could be tried on it."""
    job = schema_job(tmp_path, {"kind": "simulated", "step_s": 0}, rows=20)
    assert batchrunner.run(job).exit_code == 0
    assert {row["parsed"]["kind"] for row in results_of(job)} <= {"a", "b"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"check": {"regex": "("}}, "not a regular expression"),
    "column": ({"check": {"expression": "outptu == 1"}}, "did you mean 'output'?"),
    "no chat": ({"check": {"regex": "x", "feedback": True}}, "go with chats only"),
    "samples": (
        {"check": {"regex": "x", "feedback": True}, "prompt": CHAT, "sampling": {"n": 2}},
        "check.feedback goes with one output",
    ),
    "schema": ({"sampling": {"json_schema": {"type": "strin"}}}, "not a JSON Schema that answers"),
    "parsed": (
        {"output": {"columns": ["parsed"]}, "input": {"columns": ["parsed"]}},
        "a result has a column 'parsed' of its own",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_checked(tmp_path: Path, name: str) -> None:
    """It is said in one line before anything is sent."""
    changes, told = WRONG[name]
    write_rows(tmp_path / "input.parquet", 2, parsed=["x", "y"])
    refused = batchrun("check", write_job(job_of(tmp_path, **changes), tmp_path))
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


CHECK = {"regex": "good", "tries": 2}


def every_third_fails(sent: Sent) -> Body:
    """The first answer is bad, the second good but for every third row."""
    number = int(sent.prompt.split()[1])
    return says(sent, "good" if sent.tries > 1 and number % 3 else "bad")


def counts_of(rows: int) -> dict[str, Any]:
    """What is counted for so many rows, a multiple of 3, with that script."""
    failed = rows // 3
    return {
        "rows_asked_again": rows,
        "asked_again": rows,
        "rows_mended": rows - failed,
        "rows_failed": failed,
        "output_tokens": rows + failed,
        "prompt_tokens": 2 * rows,
    }


def numbers(checks: dict[str, Any]) -> dict[str, Any]:
    """The counts without the causes, of which there is one."""
    (cause,) = checks["causes"]
    assert cause["rows"] == checks["output_tokens"]
    assert cause["example"] == "the answer has no match of check.regex 'good'"
    return {name: count for name, count in checks.items() if name != "causes"}


def test_a_run_that_was_killed(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows in parts and in journals count with the start that resumes, each once."""

    def held(sent: Sent) -> Behaviour | Body:
        return "hold" if int(sent.prompt.split()[1]) >= 50 else every_third_fails(sent)

    server.script = held
    job = job_of(
        tmp_path, server, rows=90, window=90, check=CHECK, output={"part_rows": 20, "durable": 0.05},
        order="input",
        limits={"max_failed_rows": 1.0, "abort_failed_share": 1.0},
    )  # fmt: skip
    run = tmp_path / "run"
    with started(write_job(job, tmp_path)):
        eventually(lambda: len(list(run.glob("parts/*.parquet"))) == 2)
        eventually(lambda: status_of(run).get("rows_on_disk") == 50)
    server.forget()
    server.script = every_third_fails
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert report_of(job)["rows_resumed"] == 50
    assert numbers(report_of(job)["checks"]) == counts_of(90)
    assert "90 rows were asked again 90 times: 60 then had a good answer, 30 failed" in result.stderr
    merged = json.loads(batchrun("merge", run, "--json").stdout)
    assert numbers(merged["report"]["checks"]) == counts_of(90)
    metadata = pq.read_schema(run / "merged" / "merged-000000.parquet").metadata
    assert not [key for key in metadata if b"checks" in key]


def test_failed_rows_that_are_sent_again(tmp_path: Path, server: FakeSGLang) -> None:
    """What their first answers cost is no part of the counts any more, as it is none of the others."""
    server.script = every_third_fails
    job = job_of(tmp_path, server, rows=30, check=CHECK, limits={"abort_failed_share": 1.0})
    assert batchrunner.run(job).exit_code == 3
    server.forget()
    server.script = script("good")
    report = batchrunner.run(job, retry_failed=True)
    assert report.exit_code == 0
    checks = report.checks
    assert (checks["rows_asked_again"], checks["rows_mended"], checks["rows_failed"]) == (20, 20, 0)
    assert (checks["output_tokens"], checks["prompt_tokens"]) == (20, 40)
    assert checks["causes"][0]["rows"] == 20
    assert batchrunner.run(job).checks == checks  # nothing is left to do


def test_the_samples_of_a_row_count_once(tmp_path: Path, server: FakeSGLang) -> None:
    """Also where equal rows share an answer."""
    write_rows(tmp_path / "input.parquet", 6, same=["equal"] * 6)
    server.script = script("bad", "good")
    sampling = {"n": 3, "temperature": 0}
    job = job_of(tmp_path, server, prompt={"text": "same"}, check=CHECK, sampling=sampling)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_deduplicated, len(results_of(job))) == (0, 5, 6)
    checks = batchrunner.run(job).checks
    assert (checks["rows_asked_again"], checks["asked_again"], checks["output_tokens"]) == (1, 1, 3)
    assert checks == report.checks


def test_tasks_share_checks_functions_and_samples(tmp_path: Path, server: FakeSGLang) -> None:
    """Two tasks of a run: each row once, with all its samples; their counts come together."""
    write_hooks(tmp_path)
    write_rows(tmp_path / "input.parquet", 600)
    job = job_of(tmp_path, server, sampling={"n": 2}, input={"columns": ["id"]}, **HOOKED)
    file = write_job(job, tmp_path)
    with started(file, "--join") as first:
        server.wait_for(20)
        with started(file, "--join") as second:
            assert first.end() == 0
            assert second.end() == 0
    merged = json.loads(batchrun("merge", tmp_path / "run", "--json").stdout)
    check_hooked(pq.read_table(merged["path"]).to_pylist(), 600)
    checks = merged["report"]["checks"]
    assert (checks["rows_mended"], checks["asked_again"], checks["causes"][0]["rows"]) == (600, 600, 600)
