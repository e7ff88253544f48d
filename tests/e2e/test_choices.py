"""Jobs with `task: score` and choices: each row has their log likelihoods, and computes its prompt once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import batchrun, job_of, results_of, write_job
from tests.support.answers import logprob_for
from tests.support.fake_sglang import FakeSGLang

if TYPE_CHECKING:
    from collections.abc import Iterator

CHOICES = [" Rome", " Paris, I think", " é"]
BEGIN, MERGED = 1, 900
"""The token that begins a prompt, and the one of `xy`."""


def tokens_in(text: str) -> list[int]:
    """Return the tokens of a text: the first one, one for `xy`, and one for each other character."""
    return [BEGIN, *(MERGED if part == "\0" else ord(part) for part in text.replace("xy", "\0"))]


def tokens_of(body: dict[str, Any]) -> list[int]:
    return tokens_in(body["prompt"])


def likelihood(text: str, begin: int) -> float:
    """Return the log likelihood of the tokens of a text from one on."""
    ids = tokens_in(text)
    return sum(logprob_for(str(ids[:at]), ids[at]) for at in range(begin, len(ids)))


@pytest.fixture
def scorer() -> Iterator[FakeSGLang]:
    """A server of a model that generates texts."""
    with FakeSGLang(tokenize=tokens_of) as fake:
        yield fake


def choice_job(directory: Path, engine: Any, texts: list[str], choices: Any = None, **changes: Any) -> Any:
    """A job with these prompts; `choices` is a list for each row, or None for CHOICES in the job."""
    columns: dict[str, Any] = {"id": [*range(len(texts))], "text": texts}
    if choices is not None:
        columns["mine"] = pa.array(choices, pa.list_(pa.string()))
    pq.write_table(pa.table(columns), directory / "input.parquet")
    prompt = {"text": "{{ text }}", "choices": CHOICES if choices is None else "mine"}
    return job_of(directory, engine, **{"task": "score", "prompt": prompt, **changes})


def run(job: dict[str, Any], directory: Path, *options: str) -> Any:
    return batchrun(write_job(job, directory), *options)


@pytest.mark.usefixtures("full_requests")
def test_likelihoods_of_choices(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Sums, and sums by token and by byte; the prompt goes first with one choice, then with the others."""
    job = choice_job(tmp_path, scorer, ["The capital is", "Where?"])
    result = run(job, tmp_path)
    assert result.exit_code == 0, result.stderr
    for row, text in zip(results_of(job), ["The capital is", "Where?"], strict=True):
        sums = [likelihood(text + choice, len(text) + 1) for choice in CHOICES]
        assert row["scores"] == pytest.approx(sums)
        assert row["scores_per_token"] == pytest.approx(
            [total / len(choice) for total, choice in zip(sums, CHOICES, strict=True)]
        )
        assert row["scores_per_byte"] == pytest.approx(
            [total / len(choice.encode()) for total, choice in zip(sums, CHOICES, strict=True)]
        )
        assert row["prompt_tokens"] == sum(len(text) + 1 + len(choice) for choice in CHOICES)
    assert scorer.requests == 4
    for text in ("The capital is", "Where?"):
        first, *others = (
            sent for sent in scorer.sent if sent.prompt.startswith(str(tokens_in(text))[:-1] + ",")
        )
        assert first.together == 1
        assert first.body["input_ids"] == tokens_in(text + CHOICES[0])
        assert [sent.together for sent in others] == [2, 2]
        assert {sent.body["logprob_start_len"] for sent in (first, *others)} == {len(text)}


def test_a_token_across_the_boundary(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Where the prompt's end and a choice's beginning are one token, all choices begin before it."""
    job = choice_job(tmp_path, scorer, ["say x"], [["y", "z"]])
    assert run(job, tmp_path).exit_code == 0
    (row,) = results_of(job)
    assert row["scores"] == pytest.approx([likelihood("say xy", 5), likelihood("say xz", 5)])
    assert [total / count for total, count in zip(row["scores"], [1, 2], strict=True)] == pytest.approx(
        row["scores_per_token"]
    )


def test_lists_of_rows_and_bad_ones(tmp_path: Path, scorer: FakeSGLang) -> None:
    """Each row has choices of its own; bad lists fail their rows with the reason."""
    lists = [[" a"], [" a", " b"], [], None, ["", " a"], [None], [" a", " b", " c"]]
    limits = {"max_failed_rows": "100%", "abort_failed_share": 1}
    job = choice_job(tmp_path, scorer, [f"row {n}" for n in range(7)], lists, limits=limits)
    assert run(job, tmp_path).exit_code == 0
    rows = results_of(job)
    why = "prompt.choices: column 'mine' is null or empty, or has such an item"
    assert {row["row"]: row["error"] for row in rows if row["error"]} == dict.fromkeys(range(2, 6), why)
    assert [row["scores"] and len(row["scores"]) for row in rows] == [1, 2, None, None, None, None, 3]


def test_refused_and_odd_likelihoods(tmp_path: Path, scorer: FakeSGLang) -> None:
    """A choice that is refused, or has no number, fails its row alone."""
    scorer.script = lambda sent: "too long" if sent.prompt == str(tokens_in("b Rome")) else "answer"
    scorer.logprob = lambda prompt, token: (
        None if prompt == str(tokens_in("c R")) else logprob_for(prompt, token)
    )
    limits = {"max_failed_rows": 2, "abort_failed_share": 1, "max_attempts": 1}
    job = choice_job(tmp_path, scorer, ["a", "b", "c", "d"], limits=limits)
    assert run(job, tmp_path).exit_code == 0
    errors = [row["error"] for row in results_of(job)]
    assert errors[0] is errors[3] is None
    assert "longer than the model's context length" in errors[1]
    assert "the log likelihood of a choice is not a number" in errors[2]


@pytest.mark.usefixtures("full_requests")
def test_rows_share_requests(tmp_path: Path, scorer: FakeSGLang) -> None:
    """The choices of several rows go in one list; a list with a bad one is sent in halves."""
    texts = [f"{chr(97 + n)}" for n in range(24)]
    expected = [[likelihood(text + choice, 2) for choice in CHOICES] for text in texts]
    scorer.script = lambda sent: "too long" if sent.prompt == str(tokens_in("b Rome")) else "answer"
    limits = {"max_failed_rows": 1, "abort_failed_share": 1}
    job = choice_job(tmp_path, scorer, texts, limits=limits, bundle=8, window=24)
    assert run(job, tmp_path).exit_code == 0
    rows = results_of(job)
    assert [row["row"] for row in rows if row["error"]] == [1]
    for row, scores in zip(rows, expected, strict=True):
        assert row["error"] or row["scores"] == pytest.approx(scores)
    assert max(sent.together for sent in scorer.sent) > len(CHOICES)
