"""Checked answers: parsed JSON, conditions, rows asked again, answers that were cut, and their counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    batchrun,
    column_of,
    eventually,
    job_of,
    parts_of,
    printed,
    report_of,
    results_of,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.answers import Body
from tests.support.fake_sglang import FakeSGLang, Sent, answer
from tests.support.runs import status_of, until_stored

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
    assert results_of(job)[0]["error"] == "the answer was truncated at max_new_tokens"
    job["on_length"] = "keep"
    assert batchrunner.run(job, fresh=True).exit_code == 0


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


DEEP = "[" * 2000 + "]" * 2000
LIST = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}
ANSWERS: dict[str, tuple[Any, dict[str, str | None]]] = {
    "deep": (True, {DEEP: "JSON", "[[]]": None}),
    "cents": (
        {"type": "number", "multipleOf": 0.01},
        {"0.07": None, "19.99": None, "1e308": None, "3": None, "0.075": "0.075 is not a multiple of 0.01"},
    ),
    "dialect": (
        {"type": "string", "pattern": r"^(?<first>\p{Lu})\p{L}+$"},
        {'"Ärger"': None, '"ärger"': "does not match"},
    ),
    "list": (LIST, {'{"v": 1, "next": {"v": 2, "next": null}}': None, '{"v": 1, "next": 2}': "is not valid"}),
    "number": (
        {"type": "number"},
        {
            "1e400": "the answer is not JSON: Number out of range",
            "9" * 400: "too large for a float (limit 1.8e308)",
        },
    ),
    "integer": ({"type": "integer"}, {"9" * 30: f"{'9' * 30} has more than 64 bits"}),
    "half a letter": ({"type": "string"}, {'"\\ud800"': "the answer is not JSON: "}),
    "an empty schema": ({}, {"5": None, "five": "the answer is not JSON"}),
    "a slow pattern": ({"pattern": r"^(a*)*\1b$"}, {f'"{"a" * 60}"': "Max limit for backtracking"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_odd_schemas_and_answers(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """Each answer is good, or fails its row with a reason: also what no column can hold."""
    schema, expected = ANSWERS[name]
    answers = [*expected]
    server.script = lambda sent: says(sent, answers[sent.row])
    job = job_of(
        tmp_path, server, rows=len(answers), accept={"json": schema, "tries": 1},
        output={"columns": ["parsed"]}, limits={"max_failed_rows": 1.0},
    )  # fmt: skip
    assert batchrunner.run(job).exit_code == 0
    for row, (text, told) in zip(results_of(job), expected.items(), strict=True):
        error = row["error"] or ""
        assert error == "" if told is None else told in error, (text, error)
        assert (row["output"], row["parsed"] is None) == (text, told is not None)
        assert len(error) < 600


ASKED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "fence": (
        {"json": True}, '```json\n{"a": 1}\n```', '{"a": 1}',
        "the answer is not JSON: a code fence (```) surrounds it",
    ),
    "schema": ({"json": SCHEMA}, "{}", '{"kind": "a"}', "the answer does not satisfy its schema"),
    "regex": ({"regex": r"^\d+$"}, "no 5", "55", r"the answer has no match of accept.regex '^\\d+$'"),
    "expression": (
        {"expression": "output | length > id + 1 and finish_reason == 'stop'"}, "x", "xx",
        "accept.expression is not true: output | length > id + 1",
    ),
    "odd": ({"expression": "output + 1 > 2"}, "x", "y", "accept.expression fails: "),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_that_is_not_good_is_asked_for_again(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """With a new seed and a higher temperature, three times; then it fails with its last answer."""
    check, bad, good, told = ASKED[name]
    server.script = script(bad, bad, good)
    job = job_of(tmp_path, server, rows=1, prompt=CHAT, accept=check, sampling={"temperature": 0})
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


@pytest.mark.parametrize("prompt", [{"text": "text"}, CHAT])
def test_a_row_s_own_temperature_is_that_of_its_first_try(
    tmp_path: Path, server: FakeSGLang, prompt: Any
) -> None:
    """Where it is null, the engine's default holds; it rises otherwise."""
    write_rows(tmp_path / "input.parquet", 3, heat=[0.3, None, 0.0])
    server.script = script("bad")
    job = job_of(
        tmp_path, server, prompt=prompt, sampling={"temperature": {"column": "heat"}},
        accept={"regex": "good", "tries": 4},
    )  # fmt: skip
    batchrunner.run(job)
    for number, temperatures in enumerate([[0.3, 0.4, 0.8, 0.8], [None] * 4, [0, 0.4, 0.8, 0.8]]):
        sent = [sampling_of(sent) for sent in server.sent if sent.row == number]
        assert [sampling.get("temperature") for sampling in sent] == temperatures


def test_a_chat_is_told_what_was_wrong(tmp_path: Path, server: FakeSGLang) -> None:
    """The answer and the complaint stand in the conversation, the last ones only."""
    server.script = lambda sent: says(sent, f"bad {len(server.sent)}")
    job = job_of(tmp_path, server, rows=1, prompt=CHAT, accept={"regex": "good", "feedback": True})
    batchrunner.run(job)
    first, second, third = (sent.body["messages"] for sent in server.sent)
    complaint = "This answer is not good: the answer has no match of accept.regex 'good'. Answer again."
    for messages, text in ((second, "bad 1"), (third, "bad 2")):
        assert messages == [
            *first, {"role": "assistant", "content": text}, {"role": "user", "content": complaint},
        ]  # fmt: skip


def test_samples_must_all_be_good(tmp_path: Path, server: FakeSGLang) -> None:
    job = job_of(tmp_path, server, rows=1, accept={"regex": "^answer [01]"}, sampling={"n": 3})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row["error"].startswith("sample 2: the answer has no match")
    assert len(row["output"]) == 3


def test_equal_rows_are_told_apart_by_what_the_check_reads(tmp_path: Path, server: FakeSGLang) -> None:
    """Two rows with one request share an answer only where the check sees the same in both."""
    pq.write_table(pa.table({"text": ["x"] * 4, "want": ["a", "a", "b", "b"]}), tmp_path / "input.parquet")
    server.script = lambda sent: says(sent, "a")
    check = {"expression": "output == want", "tries": 1}
    job = job_of(tmp_path, server, accept=check, sampling={"temperature": 0})
    report = batchrunner.run(job)
    assert [row["error"] is None for row in results_of(job)] == [True, True, False, False]
    assert (report.rows_ok, report.rows_failed, len(server.sent)) == (2, 2, 2)
    assert column_of(job, "output") == ["a"] * 4


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_cut_answer_is_asked_for_with_more_tokens(
    tmp_path: Path, server: FakeSGLang, *, goes_on: bool
) -> None:
    """Twice as many each time, also with a grammar; the fourth one that is cut fails its row."""
    texts = ['{"ki', '{"kind', '{"kind"', '{"kin' if goes_on else json.dumps(GOOD)]
    server.script = lambda sent: says(
        sent, texts[sent.tries - 1], "length" if goes_on or sent.tries < 4 else "stop"
    )
    job = schema_job(
        tmp_path, server, on_length="longer", accept={"tries": 1}, sampling={"max_new_tokens": 4}
    )
    assert batchrunner.run(job).exit_code == (3 if goes_on else 0)
    assert [sampling_of(sent)["max_new_tokens"] for sent in server.sent] == [4, 8, 16, 32]
    (row,) = results_of(job)
    assert row["output"] == texts[-1]
    assert row["error"] == ("the answer was truncated at max_new_tokens" if goes_on else None)
    assert report_of(job)["checks"]["asked_again"] == 3


def test_json_that_is_padded_with_blanks_is_not_lengthened(tmp_path: Path, server: FakeSGLang) -> None:
    """It is counted as such, no more of the same is asked for, and a further try ends where it is padded."""
    padded = '{"kind":' + " \n" * 40
    texts = [(padded, "length"), ('{"kind":' + " " * 66, "stop"), (json.dumps(GOOD), "stop")]
    server.script = lambda sent: says(sent, *texts[sent.tries - 1])
    job = schema_job(
        tmp_path, server, on_length="longer", accept={"tries": 3}, sampling={"max_new_tokens": 50}
    )
    assert batchrunner.run(job).exit_code == 0
    samplings = [sampling_of(sent) for sent in server.sent]
    assert [sampling["max_new_tokens"] for sampling in samplings] == [50] * 3
    assert [sampling.get("stop_regex") for sampling in samplings] == [None, [r"\s{64}"], [r"\s{64}"]]
    (cause,) = report_of(job)["checks"]["causes"]
    assert cause["rows"] == 2
    assert cause["example"].endswith("start the server with --constrained-json-max-whitespace-cnt 64")
    server.script = lambda sent: says(sent, padded, "length")
    job["accept"] = {"tries": 1}
    batchrunner.run(job, fresh=True)
    (row,) = results_of(job)
    assert row["error"].startswith("the answer was padded with blanks: ")
    assert len(server.sent) == 4


def test_rows_after_a_padded_answer_end_where_they_are_padded(tmp_path: Path, server: FakeSGLang) -> None:
    """On a server that bounds no blanks, the first padded answer tells; until then no request pays for it."""
    server.script = lambda sent: (
        says(sent, "{" + " " * 64, "length") if len(server.sent) == 1 else says(sent, json.dumps(GOOD))
    )
    job = schema_job(tmp_path, server, rows=3, window=1, sampling={"stop_regex": "x"})
    assert batchrunner.run(job).rows_ok == 2
    stops = [sampling_of(sent)["stop_regex"] for sent in server.sent]
    assert stops == ["x", ["x", r"\s{64}"], ["x", r"\s{64}"]]


def test_bad_json_after_a_padded_answer_is_told_as_such(tmp_path: Path, server: FakeSGLang) -> None:
    """An answer that the model ended itself was not padded, though its request has the `stop_regex`."""
    server.script = lambda sent: (
        says(sent, "{" + " " * 64, "length") if len(server.sent) == 1 else says(sent, "{}")
    )
    job = schema_job(tmp_path, server, rows=2, window=1)
    assert batchrunner.run(job).rows_failed == 2
    padded, wrong = sorted((row["error"] for row in results_of(job)), reverse=True)
    assert padded.startswith("the answer was padded with blanks: ")
    assert wrong.startswith("the answer does not satisfy its schema: ")


def test_a_row_that_is_refused_later_keeps_its_answer(tmp_path: Path, server: FakeSGLang) -> None:
    """With more tokens it may be too long for the model."""
    server.script = lambda sent: says(sent, "x", "length") if len(server.sent) == 1 else "too long"
    job = job_of(tmp_path, server, rows=1, on_length="longer")
    batchrunner.run(job)
    (row,) = results_of(job)
    assert row["output"] == "x"
    assert row["error"].startswith("400: The input (6001 tokens)")


@pytest.mark.parametrize(
    ("pattern", "text", "reason", "more", "fails"),
    [
        ("(yes|no)", "yes", "stop", {}, False),
        ("(yes|no)", "I think so.", "stop", {}, True),
        ("(yes|no)", "yes, I think", "stop", {"stop": ["."]}, True),
        ("(yes|no)", "ye", "stop", {}, True),
        ("(yes|no)", "ye", "length", {}, False),
        ("(yes|no)", "ye", "stop", {"stop": ["s"]}, False),
        (" (yes|no)", "yes", "stop", {}, False),
        (r".+\W\w+", "line\n\u00e9\u00e9", "stop", {}, False),
        (r"\x{4e00}", "anything", "stop", {}, False),
        ("(a|a)+b", "a" * 30, "stop", {}, False),
        ("[a-z]", "5", "stop", {}, True),
    ],
)
def test_an_answer_follows_its_regular_expression(
    tmp_path: Path,
    server: FakeSGLang,
    pattern: str,
    text: str,
    reason: str,
    more: dict[str, Any],
    fails: bool,
) -> None:
    """A server that ignores `sampling.regex` fails its rows; where dialects differ an answer is believed."""
    server.script = lambda sent: says(sent, text, reason)
    write_rows(tmp_path / "input.parquet", 1, pattern=[pattern])
    of_job = "yes" in pattern
    sampling = {"regex": pattern if of_job else {"column": "pattern"}, **more}
    job = job_of(tmp_path, server, sampling=sampling, limits={"max_failed_rows": 1})
    batchrunner.run(job)
    (row,) = results_of(job)
    assert (row["output"], len(server.sent)) == (text, 1)
    wrong = f"the answer does not match sampling.regex {pattern!r}: the server seems to ignore it"
    assert row["error"] == (wrong if fails else None)


async def test_in_the_library(server: FakeSGLang) -> None:
    server.script = script("bad", "5")
    check = {"json": {"type": "integer"}}
    assert batchrunner.generate(["a"], engine=server.url, accept=check)["parsed"].to_pylist() == [5]
    rows = [row async for row in batchrunner.stream(["b"], engine=server.url, accept=check)]
    assert [row["parsed"] for row in rows] == [5]


def test_the_simulated_engine_obeys_schemas(tmp_path: Path) -> None:
    """Its JSON is made up; else no job with a schema could be tried on it."""
    job = schema_job(tmp_path, {"kind": "simulated", "step_s": 0}, rows=20)
    assert batchrunner.run(job).exit_code == 0
    assert {row["parsed"]["kind"] for row in results_of(job)} <= {"a", "b"}


CHECK = {"regex": "good", "tries": 2}


def every_third_fails(sent: Sent) -> Body:
    """The first answer is bad, the second good but for every third row."""
    return says(sent, "good" if sent.tries > 1 and sent.row % 3 else "bad")


def test_a_run_that_was_killed(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows in parts and in journals count with the start that resumes, each once."""

    server.script = lambda sent: "hold" if sent.row >= 50 else every_third_fails(sent)
    job = job_of(
        tmp_path, server, rows=90, window=90, accept=CHECK, output={"part_rows": 20, "durable": 0.05},
        order="input",
        limits={"max_failed_rows": 1.0, "abort_failed_share": 1.0},
    )  # fmt: skip
    run = tmp_path / "run"
    with started(write_job(job, tmp_path)):
        eventually(lambda: len(list(run.glob("parts/*.parquet"))) == 2)
        until_stored(run, 50)
    server.forget()
    server.script = every_third_fails
    result = run_job(job, tmp_path)
    assert report_of(job)["rows_resumed"] == 50
    told = (
        "90 retries of 90 rows after a rejected answer: 60 then had a good answer, 30 failed; "
        "120 of the output tokens"
    )
    assert told in result.stderr
    merged = printed("merge", run)
    kept = sum(column_of(job, "completion_tokens"))
    # of first answers; failed rows keep their second one
    assert merged["report"]["output_tokens"] == status_of(run)["output_tokens"] == kept + 90
    for checks in (report_of(job)["checks"], merged["report"]["checks"]):
        (cause,) = checks.pop("causes")
        assert (cause["rows"], cause["example"]) == (120, "the answer has no match of accept.regex 'good'")
        assert checks == {
            "rows_asked_again": 90, "asked_again": 90, "rows_mended": 60, "rows_failed": 30,
            "output_tokens": 120, "prompt_tokens": 180,
        }  # fmt: skip


def test_failed_rows_that_are_sent_again(tmp_path: Path, server: FakeSGLang) -> None:
    """What their first answers cost is no part of the counts any more, as it is none of the others."""
    server.script = every_third_fails
    job = job_of(tmp_path, server, rows=30, accept=CHECK, limits={"abort_failed_share": 1.0})
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
