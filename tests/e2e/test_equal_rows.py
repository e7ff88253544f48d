"""What reaches the engine of rows that are alike, and what each of them gets."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.types import Outcome, Request
from batchrunner.dispatch.tokenize import RowTokenizer
from tests.conftest import column_of, eventually, job_of, results_of, started, write_job
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent

pytestmark = pytest.mark.usefixtures("quick_retries")
GREEDY = {"temperature": 0}


def alike(directory: Path, server: FakeSGLang, texts: list[str], **changes: Any) -> dict[str, Any]:
    """Return a greedy job on these texts."""
    path = directory / "input.parquet"
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path)
    return job_of(directory, server, **{"sampling": GREEDY, "input": {"columns": ["id"]}, **changes})


def length_of(sent: Sent) -> int:
    return int(sent.body["sampling_params"]["max_new_tokens"])


def test_equal_rows_are_sent_once(tmp_path: Path, server: FakeSGLang) -> None:
    """Each of them gets the answer, marked as not sent; no token of it counts twice."""
    texts = [f"text {row % 10}" for row in range(40)]
    job = alike(tmp_path, server, texts)
    report = batchrunner.run(job)
    assert sorted(server.prompts) == sorted(set(texts))
    assert (report.rows_ok, report.rows_deduplicated) == (40, 30)
    results = results_of(job)
    assert [row["output"] for row in results] == [f"answer 0 to {text}" for text in texts]
    assert [row["id"] for row in results] == list(range(40))
    assert sum(row["attempts"] for row in results) == 10
    again = batchrunner.run(job)
    assert (again.output_tokens_all_starts, again.rows_deduplicated) == (report.output_tokens, 30)


@pytest.mark.parametrize(
    "changes",
    [{"dedupe": False}, {"sampling": {"temperature": 0.5}}, {"sampling": {}}],
    ids=["off", "chance", "the engine's own temperature"],
)
def test_equal_rows_are_all_sent_where_their_answers_may_differ(
    tmp_path: Path, server: FakeSGLang, changes: dict[str, Any]
) -> None:
    """A job that samples wants as many answers as it has rows."""
    batchrunner.run(alike(tmp_path, server, ["same"] * 12, **changes))
    assert server.prompts == ["same"] * 12


@pytest.mark.parametrize(("what", "tries"), [("too long", 1), ("broken 500", 5)])
def test_equal_rows_fail_together(tmp_path: Path, server: FakeSGLang, what: Behaviour, tries: int) -> None:
    """What the engine refuses has had all its tries for each of them, and every such row says so."""
    server.script = lambda sent: what if sent.prompt == "bad" else "answer"
    job = alike(tmp_path, server, ["bad", "good", "bad"], limits={"max_failed_rows": 2})
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (1, 2)
    assert server.prompts.count("bad") == tries
    errors = column_of(job, "error")
    assert errors[0] == errors[2] is not None


def test_equal_rows_survive_a_kill(tmp_path: Path, server: FakeSGLang) -> None:
    """After kill -9 in mid-run each row is there once, whichever of the equal ones were written before."""
    server.delay_s = 0.02
    texts = [f"text {row % 300}" for row in range(1200)]
    job = alike(tmp_path, server, texts, output={"part_rows": 50, "durable": 0.05}, window=8)
    with started(write_job(job, tmp_path)) as run:
        eventually(lambda: len(list((tmp_path / "run" / "parts").glob("part-*.parquet"))) >= 2)
        run.process.kill()
    server.delay_s = 0.0
    assert batchrunner.run(job).rows_ok == 1200
    results = results_of(job)
    assert [row["row"] for row in results] == list(range(1200))
    assert [row["output"] for row in results] == [f"answer 0 to {text}" for text in texts]


def test_long_rows_are_made_ready_a_few_at_a_time(
    tmp_path: Path, server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of prompts take much memory: few are made at once, and not many wait to be sent."""
    monkeypatch.setattr("batchrunner.dispatch.reorder.PIECE_BYTES", 32_000)
    monkeypatch.setattr("batchrunner.dispatch.queue.READ_AHEAD_BYTES", 5000)
    made: list[int] = []
    ahead: list[int] = []
    tokenize = RowTokenizer.tokenize

    async def counted(prompts: RowTokenizer, items: list[Request]) -> list[Request | Outcome]:
        made.append(len(items))
        return await tokenize(prompts, items)

    def script(sent: Sent) -> Behaviour:
        ahead.append(sum(made) - len(server.sent))
        return "answer"

    monkeypatch.setattr(RowTokenizer, "tokenize", counted)
    server.script = script
    job = alike(tmp_path, server, [f"{row} {'x' * 1000}" for row in range(60)], order="input", window=1)
    assert batchrunner.run(job).rows_ok == 60
    assert max(made) == 2
    assert max(ahead) <= 5 + 2


def test_one_beginning_for_all_is_computed_first(tmp_path: Path, server: FakeSGLang) -> None:
    """Before an empty engine gets the rows, one token is asked for behind what they have in common."""
    server.script = lambda sent: "hold" if length_of(sent) == 1 else "answer"
    job = alike(tmp_path, server, ["few-shot " * 100 + str(row) for row in range(20)])
    with started(write_job(job, tmp_path)) as run:
        server.wait_for(1)
        assert [length_of(sent) for sent in server.sent] == [1]
        server.answer_held()
        assert run.end() == 0
    assert [length_of(sent) for sent in server.sent] == [1] + [1024] * 20
    assert len(results_of(job)) == 20


def test_what_goes_wrong_with_a_primer_costs_no_row(tmp_path: Path, server: FakeSGLang) -> None:
    """It is a help and not a row: the rows themselves are sent whatever became of it."""
    server.script = lambda sent: "disconnect" if length_of(sent) == 1 else "answer"
    job = alike(tmp_path, server, ["few-shot " * 100 + str(row) for row in range(20)])
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 20, 0)
