"""JSON Schemas and answers that stand at the edge of what can be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import batchrunner
from tests.conftest import job_of, results_of
from tests.e2e.test_checked_answers import says

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang, Sent

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
    "halves": ({"type": "integer", "multipleOf": 2}, {"4": None, "3": "3 is not a multiple of 2"}),
    "dialect": (
        {"type": "string", "pattern": r"^(?<first>\p{Lu})\p{L}+$"},
        {'"Ärger"': None, '"ärger"': "does not match"},
    ),
    "list": (LIST, {'{"v": 1, "next": {"v": 2, "next": null}}': None, '{"v": 1, "next": 2}': "is not valid"}),
    "anchor": (
        {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}},
        {"1": None, '"x"': '"x" is not of type "integer"'},
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """Each is good, or fails its row with a reason."""
    schema, expected = ANSWERS[name]
    answers = [*expected]

    def script(sent: Sent) -> Any:
        return says(sent, answers[int(sent.prompt.split()[1])])

    server.script = script
    job = job_of(
        tmp_path, server, rows=len(answers), check={"json": schema, "tries": 1},
        output={"columns": ["parsed"]}, limits={"max_failed_rows": 1.0},
    )  # fmt: skip
    assert batchrunner.run(job).exit_code == 0
    for row, (text, told) in zip(results_of(job), expected.items(), strict=True):
        assert (row["error"] is None) == (told is None), (text, row["error"])
        assert told is None or told in row["error"]
        assert (row["parsed"] is None) == (told is not None)


BIG = "123456789012345678901234567890"
NO_FIT: dict[str, tuple[Any, str, str]] = {
    "number": ({"type": "number"}, "1e400", "the answer is not JSON: Number out of range"),
    "whole number": ({"type": "number"}, "9" * 400, "a number of more than 1.8e308 is too large"),
    "integer": ({"type": "integer"}, BIG, f"{BIG} has more than 64 bits"),
    "enum": ({"enum": [1, 18446744073709551615]}, "18446744073709551616", "is not one of 1 or "),
    "half a letter": ({"type": "string"}, '"\\ud800"', "the answer is not JSON: "),
    "a slow pattern": ({"pattern": r"^(a*)*\1b$"}, f'"{"a" * 60}"', "Max limit for backtracking"),
}


@pytest.mark.parametrize("name", NO_FIT)
def test_what_no_column_can_hold(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """It fails its row, with a reason, and not the run."""
    schema, text, told = NO_FIT[name]
    server.script = lambda sent: says(sent, text if sent.prompt == "row 1" else "1")
    job = job_of(
        tmp_path, server, rows=2, check={"json": schema, "tries": 1}, output={"columns": ["parsed"]},
        limits={"max_failed_rows": 2},
    )  # fmt: skip
    assert batchrunner.run(job).exit_code == 0
    bad = results_of(job)[1]
    assert told in bad["error"]
    assert len(bad["error"]) < 600
    assert (bad["output"], bad["parsed"]) == (text, None)
