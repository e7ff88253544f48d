"""`batchrun check` shows what a run would do, and sends nothing."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from tests.conftest import (
    batchrun,
    job_of,
    results_of,
    write_job,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang


def test_check_sends_nothing(tmp_path: Path, server: FakeSGLang) -> None:
    """`check` shows three prompts, what is to do and what is done, and touches neither server nor disk."""
    job = job_of(tmp_path, server, prompt={"user": "Say {{ text }}"}, input={"limit": 5})
    result = batchrun("check", write_job(job, tmp_path), "--json")
    found = json.loads(result.stdout)
    assert (found["rows_total"], found["rows_done"], found["rows_to_do"]) == (5, 0, 5)
    assert [prompt["prompt"][0]["content"] for prompt in found["prompts"]] == [
        f"Say row {i}" for i in range(3)
    ]
    assert server.sent == []
    assert not (tmp_path / "run").exists()
    batchrunner.run(job)
    later = json.loads(batchrun("check", write_job(job, tmp_path), "--json", "--set", "input.limit=7").stdout)
    assert (later["rows_total"], later["rows_done"], later["rows_to_do"]) == (7, 5, 2)


def test_check_says_what_json_cannot_hold(tmp_path: Path, server: FakeSGLang) -> None:
    """Rows that a run would refuse before it sends them are shown with its own words."""
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "score": pa.decimal128(5, 2)}))
    message = {"role": "user", "content": "hi", "score": Decimal("1.50")}
    table = pa.table({"chat": pa.array([[message], [{**message, "score": None}]], kind), "text": ["a", ""]})
    pq.write_table(table, tmp_path / "input.parquet")
    for prompt, bad in [({"messages": "chat"}, 0), ({"text": "{{ text }}"}, 1)]:
        job = job_of(tmp_path, server, prompt=prompt, output={"path": str(tmp_path / f"run{bad}")})
        file = write_job(job, tmp_path)
        shown = batchrun("check", file)
        assert "1 of the first 2 rows cannot be sent" in shown.stdout
        found = json.loads(batchrun("check", file, "--json").stdout)["prompts"]
        batchrunner.run(job)
        errors = [row["error"] for row in results_of(job)]
        assert [prompt["error"] for prompt in found] == errors
        assert errors[bad] is not None
        assert errors[bad] in shown.stdout


def test_check_counts_what_cannot_be_sent(tmp_path: Path) -> None:
    """Rows behind the shown ones count too: null and empty prompts, and templates that fail."""
    texts = ["a", "b", "c", None, "", "d", None, "e", "f", "g"]
    pq.write_table(pa.table({"text": texts, "n": range(10)}), tmp_path / "input.parquet")
    file = write_job(job_of(tmp_path), tmp_path)
    shown = batchrun("check", file)
    assert shown.exit_code == 0
    assert "3 of the first 10 rows cannot be sent; nothing was sent" in shown.stdout
    assert "cannot be sent: 2 rows: prompt: column 'text' is null (row 3)" in shown.stdout
    assert "cannot be sent: 1 row: prompt: column 'text' is empty (row 4)" in shown.stdout
    found = json.loads(batchrun("check", file, "--json", "--set", "prompt.text={{ 6 // (n - 5) }}").stdout)
    assert (found["rows_looked_at"], found["rows_not_sendable"]) == (10, 1)
    assert found["not_sendable"][0]["example"].startswith("template: ZeroDivisionError: ")
    assert found["prompts"][2]["error"] is None


def test_check_counts_blank_prompts(tmp_path: Path) -> None:
    """They are sent, since a model answers them; the user is told."""
    (tmp_path / "input.csv").write_text("name,text\na,hello\nb,\nc,  \nd,world\n")
    job = job_of(tmp_path, prompt={"user": "{{ text }}"}, input={"path": str(tmp_path / "input.csv")})
    file = write_job(job, tmp_path)
    line = "2 of the first 4 rows would be sent with a blank prompt: input.filter leaves rows out"
    assert line in batchrun("check", file).stdout
    found = json.loads(batchrun("check", file, "--json").stdout)
    assert (found["rows_blank"], found["rows_not_sendable"]) == (2, 0)
    named = batchrun("check", file, "--set", "prompt.user=Greet {{ name }}: {{ text }}").stdout
    assert "blank" not in named
