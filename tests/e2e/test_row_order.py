"""The order in which rows are sent: as they stand, sorted by how they begin, or the longest first."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import OutputError
from tests.conftest import (
    INSTANT,
    batchrun,
    eventually,
    examples,
    job_of,
    log_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
)
from tests.support.fake_sglang import FakeSGLang
from tests.support.inputs import DOCUMENT, document, shuffled, write_texts
from tests.support.runs import rows_once, until_stored


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    """A server without a prefix cache gets rows just as the plan has them: no leader goes ahead."""
    with FakeSGLang(arguments={"disable_radix_cache": True}) as fake:
        yield fake


def stretches(texts: list[str]) -> int:
    """Count how often the document changes from one text to the next, and the first one."""
    return len(list(groupby(text[:DOCUMENT] for text in texts)))


def sent_texts(server: FakeSGLang) -> list[str]:
    return [sent.prompt for sent in server.sent]


def sorted_job(directory: Path, engine: Any = INSTANT, **changes: Any) -> dict[str, Any]:
    """Return a job that sends one row after the other, in prefix order."""
    return job_of(directory, engine, **{"order": "prefix", "window": 1, "dedupe": False, **changes})


def copies_in(run: Path) -> list[Path]:
    """Return what of sorted copies lies in a run."""
    return sorted(run.rglob("*order-*"))


def test_rows_that_begin_alike_are_sent_together(tmp_path: Path, server: FakeSGLang) -> None:
    """`order: prefix` sends each document's questions one after the other; results know their rows."""
    texts = shuffled(300, 20)
    write_texts(tmp_path / "input.parquet", texts)
    job = sorted_job(tmp_path, server)
    assert batchrunner.run(job).rows_ok == 300
    assert stretches(texts) > 200
    assert stretches(sent_texts(server)) == 20
    assert [row["output"].split()[-1] for row in results_of(job)] == [text.split()[-1] for text in texts]
    assert copies_in(tmp_path / "run") == []


def test_longest_first(tmp_path: Path, server: FakeSGLang) -> None:
    """`order: longest_first` goes by max_new_tokens where a column has it, else by the prompt."""
    texts = [f"{n}" * (7 * n % 50 + 1) for n in range(50)]
    write_texts(tmp_path / "input.parquet", texts, n=range(1, 51))
    job = sorted_job(tmp_path, server, order="longest_first")
    batchrunner.run(job)
    assert [*map(len, sent_texts(server))] == sorted(map(len, texts), reverse=True)
    server.forget()
    batchrunner.run({**job, "sampling": {"max_new_tokens": {"column": "n"}}}, fresh=True)
    assert sent_texts(server) == texts[::-1]


def test_bad_text_and_long_text(tmp_path: Path, server: FakeSGLang) -> None:
    """Bytes that are no UTF-8 and prompts of a million characters go through the sort as they are."""
    texts = pa.array([b"fine", b"\xff\xfe", b"y" * 1_000_000], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts, "n": range(3)}), tmp_path / "input.parquet")
    job = sorted_job(tmp_path, server, input={"columns": ["n"]})
    batchrunner.run(job)
    found = [(row["n"], row["error"] is None) for row in results_of(job)]
    assert found == [(0, True), (1, False), (2, True)]
    assert sorted(map(len, sent_texts(server))) == [4, 1_000_000]


@examples(8)
@given(data=st.data())
def test_every_row_once_in_any_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """However rows begin and row groups lie, sorted rows are the rows, each with its own values."""
    beginnings = st.sampled_from([document(n)[: 70 * n] for n in range(5)])
    texts = data.draw(st.lists(st.tuples(beginnings, st.text("ab", max_size=3)).map("".join), min_size=1))
    tmp_path = tmp_path_factory.mktemp("order")
    group = data.draw(st.integers(1, 20))
    write_texts(tmp_path / "input.parquet", texts, group, n=range(len(texts)))
    order = data.draw(st.sampled_from(["prefix", "longest_first"]))
    job = job_of(tmp_path, input={"columns": ["text", "n"]}, order=order, limits={"abort_failed_share": 1})
    batchrunner.run(job)
    rows = results_of(job)
    assert [row["row"] for row in rows] == [row["n"] for row in rows] == list(range(len(texts)))
    assert [row["text"] for row in rows] == texts


def test_a_killed_start_is_gone_on_with(tmp_path: Path, server: FakeSGLang) -> None:
    """After a kill in mid-run the next start goes on in the order that is there, and clears up."""
    texts = shuffled(200, 10)
    write_texts(tmp_path / "input.parquet", texts)

    server.script = lambda _: "hold" if len(server.sent) > 77 else "answer"
    job = sorted_job(tmp_path, server, output={"durable": 0.1})
    file = write_job(job, tmp_path)
    run = tmp_path / "run"
    with started(file) as process:
        eventually(lambda: len(server.sent) == 78)
        until_stored(run, 77)
        process.kill()
    assert len(copies_in(run)) == 1
    server.answer_held()
    first = sent_texts(server)[:77]
    server.forget()
    server.script = lambda _: "answer"
    run_job(job, tmp_path)
    assert stretches(first + sent_texts(server)) == 10
    assert sorted(first + sent_texts(server)) == sorted(texts)
    assert log_of(job, "order")[1]["why"] == "sorted by an earlier start of the run"
    assert copies_in(run) == []


@pytest.mark.parametrize("options", [[], ["--join"]])
def test_a_kill_in_the_middle_of_the_sort(tmp_path: Path, server: FakeSGLang, options: list[str]) -> None:
    """The next start begins the sort anew, and nothing of the one before stays."""
    write_texts(tmp_path / "input.parquet", shuffled(20_000, 100), 5000)
    server.script = lambda _: "hold"  # where the kill comes late, the run has not ended
    job = job_of(tmp_path, server, order="prefix")
    with started(write_job(job, tmp_path), *options) as process:
        eventually(lambda: list((tmp_path / "run").rglob("order-*.work")))
        process.kill()
    assert copies_in(tmp_path / "run")
    server.answer_held()
    run_job(job, tmp_path, "--limit", 300, *options)
    assert rows_in(job) == list(range(300))
    assert copies_in(tmp_path / "run") == []


def test_a_copy_that_does_not_fit_is_replaced(tmp_path: Path, server: FakeSGLang) -> None:
    """With more files the rows are sorted anew."""
    source = tmp_path / "in"
    write_texts(source / "a.parquet", shuffled(60, 5))
    server.script = lambda _: "hold"
    job = sorted_job(tmp_path, server, input={"path": str(source)})
    with started(write_job(job, tmp_path)) as process:
        server.wait_for(1)
        process.kill()
    server.answer_held()
    server.forget()
    server.script = lambda _: "answer"
    assert len(copies_in(tmp_path / "run")) == 1
    write_texts(source / "b.parquet", shuffled(40, 5))
    batchrunner.run(job)
    rows_once(job, 100)
    assert log_of(job, "order")[-1]["why"] == "set by the job"
    assert stretches(sent_texts(server)) == 5
    assert copies_in(tmp_path / "run") == []


def test_no_room_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what a sort needs and what to do instead; with `auto` the run goes on in input order."""

    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("batchrunner.input.sorted_copy.write_sorted", full)
    monkeypatch.setattr("batchrunner.input.order.WINDOW_ROWS", 50)
    write_texts(tmp_path / "input.parquet", shuffled(200, 10))
    with pytest.raises(
        OutputError,
        match=r"sorted: No space left on device: free disk space, or set order: input, which needs no sort$",
    ):
        batchrunner.run(sorted_job(tmp_path))
    job = sorted_job(tmp_path, order="auto")
    assert batchrunner.run(job).rows_ok == 200
    (told,) = log_of(job, "order")
    assert told["order"] == "input"
    assert "would be better, but" in told["why"]


def test_too_little_memory_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort that runs out of memory does not ask for disk space."""
    monkeypatch.setattr("batchrunner.input.sorted_copy.MEMORY_BYTES", 1_000_000)
    write_texts(tmp_path / "input.parquet", shuffled(200, 10))
    with pytest.raises(
        OutputError,
        match=r"sorted: Out of Memory Error: .*: set order: input, which needs no sort$",
    ):
        batchrunner.run(sorted_job(tmp_path))


def test_auto_sorts_where_it_pays(tmp_path: Path, server: FakeSGLang) -> None:
    """With more rows than are looked at together, shuffled ones are sorted; check, log and event say why."""
    write_texts(tmp_path / "input.parquet", shuffled(3000, 400))
    job = sorted_job(tmp_path, server, order="auto")
    file = write_job(job, tmp_path)
    shown = batchrun("check", file)
    reason = r"order: prefix \(sorted, \d+% of the prompt tokens can come from the cache; in input order \d+%"
    assert re.search(reason, shown.stdout)
    assert not (tmp_path / "run").exists()
    done = batchrun(file)
    assert re.search(reason, done.stderr)
    assert stretches(sent_texts(server)) == 400
    (told,) = log_of(job, "order")
    assert (told["order"], told["rows_sampled"]) == ("prefix", 3000)
    assert told["sorted_share"] > told["input_share"] + 0.05
