"""Tasks without decoding: each row has its own numbers, whatever happens on the way."""

import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from tests.conftest import (
    INSTANT,
    batchrun,
    column_of,
    ended,
    job_of,
    merged_table,
    parts_of,
    report_of,
    results_of,
    run_job,
    write_rows,
)
from tests.support.answers import HEAD, LENGTH, Body, logprob_for, vector_for, vector_of
from tests.support.blocks import ROOT
from tests.support.fake_sglang import FakeSGLang, Sent
from tests.support.runs import failed_rows

ROWS = 24
LABELS = [12, 3, 11]


class Kind(NamedTuple):
    """A task: its job and input, what its server gets first of a row, and what the row has in the end."""

    fields: dict[str, Any]
    input: Callable[[int], dict[str, Any]]
    sent: Callable[[int], str]
    column: str
    value: Callable[[int], Any]
    arguments: dict[str, Any]


def ids(row: int) -> list[int]:
    return [row, row + 1, 7]


def documents(row: int) -> list[str]:
    return [f"d{row} {number}" for number in range(1 + row % 3)]


KINDS = {
    "embed": Kind(
        {"prompt": {"input_ids": "ids"}},
        lambda row: {"ids": ids(row)},
        lambda row: str(ids(row)),
        "embedding",
        lambda row: vector_for(str(ids(row))),
        {"is_generation": False},
    ),
    "score": Kind(
        {"prompt": {"input_ids": "ids"}, "labels": LABELS},
        lambda row: {"ids": ids(row)},
        lambda row: str(ids(row)),
        "scores",
        lambda row: pytest.approx([math.exp(logprob_for(str(ids(row)), label)) for label in LABELS]),
        {},
    ),
    "rerank": Kind(
        {"prompt": {"text": "query", "documents": "documents"}},
        lambda row: {"query": f"q{row}", "documents": documents(row)},
        lambda row: str([f"q{row}", f"d{row} 0"]),
        "scores",
        lambda row: pytest.approx([logprob_for(str([f"q{row}", each]), 0) for each in documents(row)]),
        HEAD,
    ),
}


def job_for(task: str, directory: Path, server: Any, **changes: Any) -> dict[str, Any]:
    rows = [{"id": row, **KINDS[task].input(row)} for row in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "input.parquet")
    more = {"task": task, "bundle": 8, "window": ROWS, **KINDS[task].fields, **changes}
    return job_of(directory, server, **more)


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("task", KINDS)
def test_rows_share_requests(tmp_path: Path, task: str) -> None:
    """Each has its own values all the same, and the columns of its task only."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        job = job_for(task, tmp_path, server, input={"columns": ["id"]})
        run_job(job, tmp_path)
        assert server.requests < ROWS
    rows = results_of(job)
    assert [row[kind.column] for row in rows] == [kind.value(row) for row in range(ROWS)]
    assert {row["attempts"] for row in rows} == {1}
    assert parts_of(job["output"]["path"])[0].schema.names == [
        *("row", "id", "prompt_tokens", "cached_tokens", "latency_s", "attempts", "error", kind.column),
    ]
    assert report_of(job)["bundles"]["most_rows"] > 1


@pytest.mark.parametrize("task", KINDS)
def test_a_bad_row_of_a_list_fails_alone(tmp_path: Path, task: str) -> None:
    """The server refuses a list for one row: that row fails, and the others have had one try."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        server.script = lambda sent: "too long" if sent.prompt == kind.sent(5) else "answer"
        job = job_for(task, tmp_path, server, limits={"max_failed_rows": 1})
        run_job(job, tmp_path)
    rows = results_of(job)
    assert failed_rows(job) == [5]
    assert "longer than the model's context length" in rows[5]["error"]
    assert [row[kind.column] for row in rows] == [None if n == 5 else kind.value(n) for n in range(ROWS)]
    assert {row["attempts"] for row in rows} == {1}


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(
    ("task", "what"),
    [
        ("embed", "disconnect"), ("score", "busy 503"), ("rerank", "broken 500"),
        ("embed", "not json"), ("score", "no answer"),
    ],
)  # fmt: skip
def test_odd_ends_of_lists(tmp_path: Path, task: str, what: Any) -> None:
    """What goes wrong once with each row's first try is tried again."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        server.script = lambda sent: what if sent.tries == 1 else "answer"
        job = job_for(task, tmp_path, server)
        run_job(job, tmp_path)
    assert [row[kind.column] for row in results_of(job)] == [kind.value(row) for row in range(ROWS)]


@pytest.mark.parametrize("task", KINDS)
def test_resumed_joined_merged(tmp_path: Path, task: str) -> None:
    """The next start does only what is left; tasks join; files of all formats have the lists."""
    kind = KINDS[task]
    with FakeSGLang(arguments=kind.arguments) as server:
        job = job_for(task, tmp_path, server, input={"limit": 10}, output={"part_rows": 4})
        run_job(job, tmp_path, "--join")
        assert not set(server.prompts) & {kind.sent(row) for row in range(10, ROWS)}
        server.forget()
        job["input"]["limit"] = ROWS
        run_job(job, tmp_path, "--join")
        assert not set(server.prompts) & {kind.sent(row) for row in range(10)}
    found = [row[kind.column] for row in results_of(job)]
    assert found == [kind.value(row) for row in range(ROWS)]
    merged = merged_table(Path(job["output"]["path"]))
    assert merged.column(kind.column).to_pylist() == found
    for ending in ("jsonl", "csv"):
        assert batchrun("merge", job["output"]["path"], tmp_path / f"out.{ending}").exit_code == 0
        assert str(found[0][0]) in (tmp_path / f"out.{ending}").read_text()


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("embed", {}, "serves fake/model, which generates text: start the server with"),
        ("generate", {"is_generation": False}, "serves fake/model, which does not generate text"),
        ("score", {"is_generation": False}, "serves fake/model, which does not generate text"),
        (
            "rerank",
            {"is_generation": False, "architectures": ["BertModel"]},
            "BertModel has no head for task",
        ),
    ],
)
def test_a_model_for_another_task(tmp_path: Path, task: str, arguments: dict[str, Any], message: str) -> None:
    """One line before anything is sent."""
    with FakeSGLang(arguments=arguments) as fake:
        job = job_for(task, tmp_path, fake) if task in KINDS else job_of(tmp_path, fake, task=task)
        assert message in run_job(job, tmp_path, code=2).stderr
    assert fake.requests == 0


SHIPPED = [path for path in sorted((ROOT / "jobs").glob("*.yaml")) if "docs.parquet" in path.read_text()]


@pytest.mark.parametrize("job", SHIPPED, ids=lambda path: path.stem)
def test_the_jobs_that_we_ship(tmp_path: Path, job: Path) -> None:
    """Each does its rows, here on a simulated engine; the neighbours of a vector are shown."""
    titles = ["json (module)", *(f"text {n}" for n in range(1, 8))]
    pq.write_table(pa.table({"id": titles, "title": titles, "text": titles}), tmp_path / "docs.parquet")
    changes = {
        "input.path": tmp_path / "docs.parquet",
        "output.path": tmp_path / "run",
        "prompt.truncate": "null",  # the simulated engine has no tokenizer
        "engine": "{kind: simulated, step_s: 0, dimensions: 16}",
    }
    done = batchrun(job, "--json", *(f"--set={name}={value}" for name, value in changes.items()))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["rows_ok"] == 8
    if job.stem == "embed":
        shown = ended(sys.executable, ROOT / "jobs" / "show_nearest.py", tmp_path / "run").stdout
        assert "8 vectors of 16 numbers" in shown
        assert "nearest to json (module):" in shown


# --- vectors ---


@pytest.fixture
def embedder() -> Iterator[FakeSGLang]:
    """A server of an embedding model."""
    with FakeSGLang(arguments={"is_generation": False}) as fake:
        yield fake


def inputs_of(sent: Sent) -> list[list[int]]:
    """Return the prompts of the request that a row came in."""
    found = sent.body["input"]
    return found if sent.together > 1 else [found]


def column_type(job: dict[str, Any]) -> pa.DataType:
    (kind,) = {part.schema.field("embedding").type for part in parts_of(job["output"]["path"])}
    return kind


@pytest.mark.usefixtures("full_requests")
def test_lists_are_filled_by_tokens(tmp_path: Path) -> None:
    """A list has the tokens of a forward pass, with prompts of about one length; a longer one goes alone."""
    lengths = [2 + (13 * n) % 60 for n in range(200)] + [900]
    write_rows(tmp_path / "input.parquet", 201, ids=[[n + 1] * size for n, size in enumerate(lengths)])
    limits = {"is_generation": False, "max_prefill_tokens": 256, "chunked_prefill_size": -1}
    with FakeSGLang(arguments={**limits, "disable_radix_cache": True}) as fake:
        job = job_of(tmp_path, fake, task="embed", prompt={"input_ids": "ids"}, window=100)
        run_job(job, tmp_path)
    by_content = {repr(inputs): inputs for inputs in map(inputs_of, fake.sent)}
    lists = [list(map(len, inputs)) for inputs in by_content.values()]
    assert sum(map(len, lists)) == 201
    assert all(sum(each) <= 256 or len(each) == 1 for each in lists)
    assert [900] in lists
    assert len(lists) < 60
    assert sum(max(each) - min(each) for each in lists) / len(lists) < 20  # of 60 in the order of the input


@pytest.mark.parametrize("engine", ["server", "simulated"])
def test_texts_have_vectors(tmp_path: Path, embedder: FakeSGLang, engine: str) -> None:
    """Prompts may be texts, from a column or a template; equal ones are sent once."""
    write_rows(tmp_path / "input.parquet", 6, same=["x"] * 6)
    job = job_of(
        tmp_path, embedder if engine == "server" else {**INSTANT, "dimensions": LENGTH},
        task="embed", prompt={"text": "query: {{ same }}"}, bundle="off",
    )  # fmt: skip
    run_job(job, tmp_path)
    rows = results_of(job)
    assert [row["embedding"] for row in rows] == [rows[0]["embedding"]] * 6
    assert len(rows[0]["embedding"]) == LENGTH
    assert sorted(row["attempts"] for row in rows) == [0] * 5 + [1]


@pytest.mark.parametrize("as_floats", [False, True])
def test_dtype_normalize_dimensions(tmp_path: Path, embedder: FakeSGLang, as_floats: bool) -> None:
    """Vectors are shortened by the server, and made of length 1 and of 16 bits here."""
    embedder.floats = as_floats
    output = {"dtype": "float16", "normalize": True, "dimensions": 4}
    job = job_for("embed", tmp_path, embedder, output=output)
    run_job(job, tmp_path)
    assert column_type(job) == pa.list_(pa.float16())
    for row in results_of(job):
        whole = vector_for(str(ids(row["row"])))
        norm = math.hypot(*whole[:4])
        assert row["embedding"] == list(
            struct.unpack("<4e", struct.pack("<4e", *(n / norm for n in whole[:4])))
        )


def odd_vector(sent: Sent) -> list[float]:
    whole = vector_for(sent.prompt)
    return {
        str([1, 2, 7]): [math.nan, *whole[1:]],
        str([2, 3, 7]): [math.inf, *whole[1:]],
        str([3, 4, 7]): [],
        str([5, 6, 7]): [0.0] * LENGTH,
        str([6, 7, 7]): [1e5, *whole[1:]],
        str([7, 8, 7]): whole[1:],
    }.get(sent.prompt, whole)


@pytest.mark.parametrize("as_floats", [False, True])
def test_vectors_without_use(tmp_path: Path, embedder: FakeSGLang, as_floats: bool) -> None:
    """NaN, infinite, empty, zero, too short, too large for 16 bits: these rows fail, with the reason."""
    embedder.vector, embedder.floats = odd_vector, as_floats
    output = {"dtype": "float16", "dimensions": LENGTH}
    limits = {"max_failed_rows": 6}
    job = job_for("embed", tmp_path, embedder, bundle="off", output=output, limits=limits)
    run_job(job, tmp_path)
    errors = {row["row"]: row["error"] for row in results_of(job) if row["error"]}
    assert errors == {
        1: "the vector has numbers that are NaN or infinite",
        2: "the vector has numbers that are NaN or infinite",
        3: "the vector is empty",
        5: "all numbers of the vector are zero",
        6: "the vector has numbers that are too large for output.dtype: float16",
        7: "the vector has 7 numbers, but output.dimensions is 8",
    }
    assert column_type(job) == pa.list_(pa.float16())


BAD_VECTORS: dict[str, tuple[str, str]] = {
    "zeros": ("[0, 0, 0.0, -0.0, 0, 0, 0, 0]", "all numbers of the vector are zero"),
    "of another length": ("[1, 2, 3]", "the vector has 3 numbers, but earlier vectors have 8"),
    "nulls": ("[null, null, null, null, null, null, null, null]", "numbers that are NaN or infinite"),
    "NaN": ("[NaN, 1, 1, 1, 1, 1, 1, 1]", "numbers that are NaN or infinite"),
    "over a double": ("[1e999, 1, 1, 1, 1, 1, 1, 1]", "numbers that are NaN or infinite"),
    "null": ("null", "the vector is neither a list of numbers"),
    "a text": ('"?"', "the vector is neither a list of numbers"),
}


@pytest.mark.usefixtures("full_requests", "quick_retries")
@pytest.mark.parametrize("case", BAD_VECTORS)
@pytest.mark.parametrize("bad_row", [0, 13])
def test_a_bad_vector_of_a_list_is_asked_for_again_alone(
    tmp_path: Path, embedder: FakeSGLang, case: str, bad_row: int
) -> None:
    """Only its row fails, with the reason; all others are done with the one list that they came in."""
    content, reason = BAD_VECTORS[case]
    bad_prompt = KINDS["embed"].sent(bad_row)
    embedder.written = lambda sent: content if sent.prompt == bad_prompt else json.dumps(vector_of(sent))
    job = job_for("embed", tmp_path, embedder, limits={"max_failed_rows": 1})
    run_job(job, tmp_path)
    rows = results_of(job)
    assert failed_rows(job) == [bad_row]
    assert reason in rows[bad_row]["error"]
    assert [row["embedding"] for row in rows] == [
        None if n == bad_row else vector_for(str(ids(n))) for n in range(ROWS)
    ]
    together = [sent.together for sent in embedder.sent if sent.prompt == bad_prompt]
    assert together[0] > 1
    assert {*together[1:]} == {1}
    assert len(embedder.sent) == ROWS + len(together) - 1


def test_an_odd_list_reply(tmp_path: Path, embedder: FakeSGLang) -> None:
    """A reply with fewer vectors than rows says nothing of any: they are sent in other lists."""
    short = Body(b'{"data": [{"embedding": [1.0, 2.0], "index": 0}]}')
    embedder.script = lambda sent: short if sent.together > 1 else "answer"
    job = job_for("embed", tmp_path, embedder)
    run_job(job, tmp_path)
    for row in results_of(job):
        assert (row["embedding"], row["attempts"]) == (vector_for(str(ids(row["row"]))), 1)


def test_an_engine_opened_for_another_task(embedder: FakeSGLang) -> None:
    """An open engine takes jobs of its task only."""
    with batchrunner.open_engine(embedder.url, task="embed") as engine:
        assert batchrunner.embed(["x"], engine=engine).column("embedding").to_pylist() == [vector_for("x")]
        with pytest.raises(batchrunner.JobError, match="was opened for task embed, but the job"):
            batchrunner.generate(["x"], engine=engine)


# --- scores: of labels and choices, of pairs, of classes ---


TOKENS = {" yes": [11], " no": [12], "yes": [11], "perhaps": [7, 8]}
"""Tokens of the labels; others are refused."""


def tokens_of(body: dict[str, Any]) -> list[int]:
    assert body["add_special_tokens"] is False
    if body["prompt"] not in TOKENS:
        raise ValueError("not a text")
    return TOKENS[body["prompt"]]


@pytest.fixture
def scorer() -> Iterator[FakeSGLang]:
    """A server of a model that generates texts, which tells its tokens."""
    with FakeSGLang(tokenize=tokens_of) as fake:
        yield fake


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["perhaps"],
            "labels: the model splits 'perhaps' into 2 tokens (7, 8): a label must be a single token",
        ),
        ([" yes", "yes"], "labels: ' yes' and 'yes' are the same token, 11"),
        ([" yes", 11], "labels: ' yes' and 11 are the same token, 11"),
        (["??"], "labels: the engine's tokenizer refuses '??'"),
        (
            None,
            "labels: the engine does not return tokens (no /v1/tokenize): give the token ids of the labels",
        ),
    ],
)
def test_labels_that_are_no_tokens(
    tmp_path: Path, scorer: FakeSGLang, labels: list[Any] | None, message: str
) -> None:
    """One line before anything is sent, also where the server does not tell its tokens."""
    if labels is None:
        scorer.tokenize = None
    job = job_of(tmp_path, scorer, task="score", labels=labels or [" yes"])
    assert message in run_job(job, tmp_path, code=2).stderr
    assert scorer.requests == 0


def test_odd_probabilities(tmp_path: Path, scorer: FakeSGLang) -> None:
    """A row without a number fails alone; nothing is lost."""
    scorer.logprob = lambda prompt, token: None if prompt == "row 4" else logprob_for(prompt, token)
    limits = {"max_failed_rows": 1, "max_attempts": 1}
    job = job_of(tmp_path, scorer, task="score", labels=[" yes", " no"], limits=limits)
    run_job(job, tmp_path)
    assert [row["row"] for row in results_of(job) if row["scores"] is None] == [4]
    assert "the probability of a label is not a number" in results_of(job)[4]["error"]


@pytest.fixture
def reranker() -> Iterator[FakeSGLang]:
    """A server of a model with a head for scores."""
    with FakeSGLang(arguments=HEAD) as fake:
        yield fake


def pair(query: str, document: str) -> float:
    return logprob_for(str([query, document]), 0)


def test_bad_documents_and_scores(tmp_path: Path, reranker: FakeSGLang) -> None:
    """An empty list and a score that is no number fail their rows alone; a text is one document."""
    odd = str(["row 2", "n"])
    reranker.logprob = lambda prompt, at: math.nan if prompt == odd else logprob_for(prompt, at)
    write_rows(tmp_path / "input.parquet", 3, documents=["a", "", "n"])
    job = job_of(
        tmp_path, reranker, task="rerank", prompt={"text": "text", "documents": "documents"},
        limits={"max_failed_rows": 2, "max_attempts": 1},
    )  # fmt: skip
    run_job(job, tmp_path)
    rows = results_of(job)
    assert rows[0]["scores"] == [pytest.approx(pair("row 0", "a"))]
    assert (
        rows[1]["error"]
        == "prompt.documents: column 'documents' is null or empty, or has a null or empty item"
    )
    assert rows[2]["error"]


def test_scores_that_json_does_not_have(tmp_path: Path, reranker: FakeSGLang) -> None:
    """One that is NaN or over a double is null, minus infinity stays, and the row is ok."""
    odd = {str(["q", "n"]): math.nan, str(["q", "m"]): -math.inf, str(["q", "o"]): math.inf}
    reranker.logprob = lambda prompt, at: odd.get(prompt, 0.5)
    write_rows(tmp_path / "input.parquet", 1, query=["q"], documents=[["n", "a", "m", "o"]])
    job = job_of(tmp_path, reranker, task="rerank", prompt={"text": "query", "documents": "documents"})
    run_job(job, tmp_path)
    assert column_of(job, "scores") == [[None, 0.5, -math.inf, None]]


def test_classes_without_a_number(tmp_path: Path, reranker: FakeSGLang) -> None:
    """The label is that of the highest known score; the probabilities among all need all."""
    reranker.logprob = lambda prompt, at: [math.nan, -math.inf, 0.5][at]
    job = job_of(tmp_path, reranker, task="classify", rows=2)
    run_job(job, tmp_path)
    assert column_of(job, "scores") == [[None, -math.inf, 0.5]] * 2
    assert column_of(job, "label") == ["LABEL_2"] * 2
    output = {"path": str(tmp_path / "shares"), "softmax": True}
    shares = {**job, "output": output, "limits": {"max_failed_rows": 2, "max_attempts": 1}}
    run_job(shares, tmp_path)
    assert {*column_of(shares, "error")} == {"output.softmax: a score of the answer is not a number"}


def test_labels_without_a_probability(tmp_path: Path, scorer: FakeSGLang) -> None:
    """The logarithm minus infinity is the probability 0; NaN is null beside the others."""
    scorer.logprob = lambda prompt, token: {11: -math.inf, 12: math.nan}.get(token, -0.5)
    job = job_of(tmp_path, scorer, task="score", labels=[" yes", " no", 7], rows=2)
    run_job(job, tmp_path)
    assert column_of(job, "scores") == [[0.0, None, pytest.approx(math.exp(-0.5))]] * 2


def test_rewards(tmp_path: Path, reranker: FakeSGLang) -> None:
    """One number a row; a model with several classes fails them."""
    reranker.classes = 1
    job = job_of(tmp_path, reranker, task="reward", rows=4)
    run_job(job, tmp_path)
    assert column_of(job, "score") == [
        pytest.approx(logprob_for(sent, 0)) for sent in sorted(reranker.prompts)
    ]
    reranker.classes = 2
    other = {**job, "output": {"path": str(tmp_path / "two")}, "limits": {"max_failed_rows": 4}}
    run_job(other, tmp_path)
    assert {*column_of(other, "error")} == {
        "the model returned 2 numbers, but the task `reward` needs exactly one"
    }


@pytest.mark.parametrize("softmax", [False, True])
def test_classes(tmp_path: Path, reranker: FakeSGLang, softmax: bool) -> None:
    """The scores of all classes, and the name of the highest one."""
    job = job_of(tmp_path, reranker, task="classify", rows=4, output={"softmax": softmax})
    run_job(job, tmp_path)
    for row in results_of(job):
        assert row["label"] == f"LABEL_{row['scores'].index(max(row['scores']))}"
        assert (sum(row["scores"]) == pytest.approx(1)) == softmax


CHOICES = [" Rome", " Paris, I think", " é"]
BEGIN, MERGED = 1, 900
"""The token that begins a prompt, and the one of `xy`."""


def tokens_in(text: str) -> list[int]:
    """Return the tokens of a text: the first one, one for `xy`, and one for each other character."""
    return [BEGIN, *(MERGED if part == "\0" else ord(part) for part in text.replace("xy", "\0"))]


def likelihood(text: str, begin: int) -> float:
    """Return the log likelihood of the tokens of a text from one on."""
    ids = tokens_in(text)
    return sum(logprob_for(str(ids[:at]), ids[at]) for at in range(begin, len(ids)))


@pytest.fixture
def chooser() -> Iterator[FakeSGLang]:
    """A server of a model that generates texts, which tells the tokens of them."""
    with FakeSGLang(tokenize=lambda body: tokens_in(body["prompt"])) as fake:
        yield fake


def choice_job(directory: Path, engine: Any, texts: list[str], choices: Any = None, **changes: Any) -> Any:
    """A job with these prompts; `choices` is a list for each row, or None for CHOICES in the job."""
    columns: dict[str, Any] = {"id": [*range(len(texts))], "text": texts}
    if choices is not None:
        columns["mine"] = pa.array(choices, pa.list_(pa.string()))
    pq.write_table(pa.table(columns), directory / "input.parquet")
    prompt = {"text": "{{ text }}", "choices": CHOICES if choices is None else "mine"}
    return job_of(directory, engine, **{"task": "score", "prompt": prompt, **changes})


@pytest.mark.usefixtures("full_requests")
def test_likelihoods_of_choices(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Sums, and sums by token and by byte; the prompt goes first with one choice, then with the others."""
    job = choice_job(tmp_path, chooser, ["The capital is", "Where?"])
    run_job(job, tmp_path)
    for row, text in zip(results_of(job), ["The capital is", "Where?"], strict=True):
        sums = [likelihood(text + choice, len(text) + 1) for choice in CHOICES]
        assert row["scores"] == pytest.approx(sums)
        for column, sizes in (
            ("scores_per_token", [len(choice) for choice in CHOICES]),
            ("scores_per_byte", [len(choice.encode()) for choice in CHOICES]),
        ):
            assert row[column] == pytest.approx([total / n for total, n in zip(sums, sizes, strict=True)])
        assert row["prompt_tokens"] == sum(len(text) + 1 + len(choice) for choice in CHOICES)
    assert chooser.requests == 4
    for text in ("The capital is", "Where?"):
        first, *others = (
            sent for sent in chooser.sent if sent.prompt.startswith(str(tokens_in(text))[:-1] + ",")
        )
        assert first.together == 1
        assert first.body["input_ids"] == tokens_in(text + CHOICES[0])
        assert [sent.together for sent in others] == [2, 2]
        assert {sent.body["logprob_start_len"] for sent in (first, *others)} == {len(text)}


def test_a_token_across_the_boundary(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Where the prompt's end and a choice's beginning are one token, all choices begin before it."""
    job = choice_job(tmp_path, chooser, ["say x"], [["y", "z"]])
    run_job(job, tmp_path)
    (row,) = results_of(job)
    scores = [likelihood("say xy", 5), likelihood("say xz", 5)]
    assert row["scores"] == pytest.approx(scores)
    assert row["scores_per_token"] == pytest.approx([scores[0], scores[1] / 2])


def test_lists_of_rows_and_bad_ones(tmp_path: Path, chooser: FakeSGLang) -> None:
    """Each row has choices of its own; bad lists fail their rows with the reason."""
    lists = [[" a"], [" a", " b"], [], None, [None]]
    job = choice_job(tmp_path, chooser, [f"row {n}" for n in range(5)], lists, limits={"max_failed_rows": 3})
    run_job(job, tmp_path)
    rows = results_of(job)
    assert [row["scores"] and len(row["scores"]) for row in rows] == [1, 2, None, None, None]
    why = "prompt.choices: column 'mine' is null or empty, or has a null or empty item"
    assert [row["error"] for row in rows[2:]] == [why] * 3


@pytest.mark.usefixtures("full_requests")
def test_choices_of_several_rows_share_requests(tmp_path: Path, chooser: FakeSGLang) -> None:
    """The choices of several rows go in one list; a bad one fails its row, one without a number is null."""
    texts = [chr(97 + n) for n in range(24)]
    chooser.script = lambda sent: "too long" if sent.prompt == str(tokens_in("b Rome")) else "answer"
    chooser.logprob = lambda prompt, token: (
        None if prompt == str(tokens_in("c R")) else logprob_for(prompt, token)
    )
    limits = {"max_failed_rows": 1, "abort_failed_share": 1, "max_attempts": 1}
    job = choice_job(tmp_path, chooser, texts, limits=limits, bundle=8, window=24)
    run_job(job, tmp_path)
    rows = results_of(job)
    assert failed_rows(job) == [1]
    assert "longer than the model's context length" in rows[1]["error"]
    for row, text in zip(rows, texts, strict=True):
        scores: list[Any] = [likelihood(text + choice, 2) for choice in CHOICES]
        if text == "c":
            scores[0] = None
        assert row["error"] or row["scores"] == [each and pytest.approx(each) for each in scores]
        assert row["error"] or [each is None for each in row["scores_per_byte"]] == [
            each is None for each in scores
        ]
    assert max(sent.together for sent in chooser.sent) > len(CHOICES)


@pytest.mark.parametrize(("logprob", "score"), [(None, None), (-math.inf, -math.inf)])
def test_choices_without_a_likelihood(
    tmp_path: Path, chooser: FakeSGLang, logprob: float | None, score: float | None
) -> None:
    """A row fails where no choice has a number; minus infinity is one."""
    chooser.logprob = lambda prompt, token: logprob
    limits = {"max_failed_rows": 1, "max_attempts": 1}
    job = choice_job(tmp_path, chooser, ["a"], limits=limits)
    run_job(job, tmp_path)
    (row,) = results_of(job)
    if score is None:
        assert "the log likelihood of a choice is not a number" in row["error"]
    else:
        assert row["scores"] == row["scores_per_token"] == row["scores_per_byte"] == [score] * 3
