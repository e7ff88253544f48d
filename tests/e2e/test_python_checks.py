"""Answers that a Python function of the job judges."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.input.sorted_copy import decide_order
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from tests.conftest import batchrun, job_of, report_of, results_of, write_job
from tests.support.functions import write_module

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

pytestmark = pytest.mark.usefixtures("quick_retries")


def check_of(**given: Any) -> dict[str, Any]:
    """Return the part `check` of a job, with the function `hooks:judge`."""
    return {"python": "hooks:judge", "temperature": 0.5, **given}


def test_a_function_judges_answers(tmp_path: Path, server: FakeSGLang) -> None:
    """True is good, false is not, a text says why not, an exception too; the last answer is kept."""
    write_module(
        tmp_path,
        """
        def judge(answer):
            number = int(answer.split()[-1])
            if number == 1:
                return False
            if number == 2:
                return "two is too few"
            if number == 3:
                raise KeyError("three")
            return None if number == 4 else True
        """,
    )
    job = job_of(tmp_path, server, rows=8, check=check_of(tries=2), limits={"max_failed_rows": 4})
    done = batchrun(write_job(job, tmp_path))
    assert done.exit_code == 0, done.stderr
    rows = results_of(job)
    assert {row["row"]: row["error"] for row in rows if row["error"]} == {
        1: "check.python hooks:judge does not take the answer",
        2: "two is too few",
        3: "check.python: hooks.py:9: KeyError: 'three'",
        4: "check.python: hooks:judge: returned None: return True, False, or a text that says what is wrong",
    }
    assert all(row["output"].endswith(f"to row {row['row']}") for row in rows)
    assert sorted(server.prompts) == sorted(f"row {n}" for n in (*range(8), 1, 2, 3, 4))
    assert report_of(job)["rows_failed"] == 4


def test_equal_prompts_are_judged_by_their_rows(tmp_path: Path, server: FakeSGLang) -> None:
    """The carried columns say what the answer should be: an equal prompt may have another good answer."""
    write_module(
        tmp_path,
        """
        def judge(answer, row):
            return row["gold"] in answer or f"{row['gold']} is wanted"
        """,
    )
    table = pa.table({"text": ["same"] * 4, "gold": ["same", "other", "same", "another"]})
    pq.write_table(table, tmp_path / "input.parquet")
    job = job_of(
        tmp_path,
        server,
        check=check_of(tries=1, temperature=None),
        sampling={"temperature": 0},
        input={"columns": ["gold"]},
        limits={"max_failed_rows": 2},
    )
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    assert [row["error"] for row in results_of(job)] == [None, "other is wanted", None, "another is wanted"]


ROWS = 10_000
DIFFER: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "prefix"),
    "answer": ({"check": {"python": "hooks:by_answer"}}, "prefix"),
    "row": ({"check": {"python": "hooks:by_row"}}, "input"),
    "same": ({"check": {"expression": "same"}}, "prefix"),
    "differs": ({"check": {"expression": "differs"}}, "input"),
    "sampling": ({"sampling": {"temperature": 0, "max_new_tokens": {"column": "differs"}}}, "input"),
    "temperature": ({"sampling": {"temperature": {"column": "cold"}}}, "prefix"),
    "dedupe": ({"dedupe": False}, "input"),
}


@pytest.mark.parametrize("name", DIFFER)
def test_rows_that_need_unlike_answers_are_no_reason_to_sort(tmp_path: Path, name: str) -> None:
    """Where prompts are equal, but rows do not share an answer, `order: auto` keeps the input's order."""
    write_module(tmp_path, "def by_answer(answer): return True\ndef by_row(answer, row): return True")
    texts = [f"{row % (ROWS // 2)} is one" for row in range(ROWS)]
    columns = {"text": texts, "same": [1] * ROWS, "differs": [*range(1, ROWS + 1)], "cold": [0.0] * ROWS}
    pq.write_table(pa.table(columns), tmp_path / "input.parquet")
    changes, expected = DIFFER[name]
    job = job_of(tmp_path, **{"sampling": {"temperature": 0}, "python_path": [str(tmp_path)], **changes})
    with contextlib.closing(prepare(load_job(job))) as prepared:
        decision = decide_order(prepared, prepared.selected())
    assert decision.order == expected, decision.why


def test_a_judge_is_checked_and_refused_like_other_functions(tmp_path: Path, server: FakeSGLang) -> None:
    """Before the start, and by --no-python."""
    write_module(tmp_path, "def judge(): pass")
    file = write_job(job_of(tmp_path, server, check=check_of()), tmp_path)
    wrong = batchrun("check", file)
    assert wrong.exit_code == 2
    assert "check.python: hooks:judge takes (): it is called with one argument, the answer" in wrong.stderr
    refused = batchrun(file, "--no-python")
    assert refused.exit_code == 2
    assert "check.python is hooks:judge, a Python function that the job would run" in refused.stderr


def test_a_program_gives_its_judge(server: FakeSGLang) -> None:
    """`generate` takes the function itself."""
    table = batchrunner.generate(
        ["Ada", "Bob"],
        check={"python": lambda answer: "Ada" in answer or "who?", "tries": 1},
        engine=server.url,
    )
    assert table.column("error").to_pylist() == [None, "who?"]
