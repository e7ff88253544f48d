"""The real SGLang on the CPU: the jobs that we ship, and what only a real engine can show.

`make test` installs the engine and prepares the model. Where they are missing these tests are skipped by
name; under CI they fail instead, so that a missing install cannot hide.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.job.call import job_of_batch
from tests.conftest import ROOT, SMALL_MODEL, batchrun, require_engine

JOBS = ROOT / "jobs"
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    require_engine("sglang")


@pytest.fixture(scope="module")
def smollm(_prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[batchrunner.OpenEngine]:
    """The real chat model on a launched server."""
    arguments = {"tool-call-parser": "pythonic"}  # with it a schema holds calls that must be made
    spec = {"kind": "server", "model": str(SMALL_MODEL), "device": "cpu", "args": arguments}
    logs = tmp_path_factory.mktemp("smollm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with batchrunner.open_engine(spec, log_dir=logs) as engine:
            yield engine


def _run_job(name: str, engine: batchrunner.OpenEngine, out: Path, *overrides: str) -> tuple[Any, pa.Table]:
    report = batchrunner.run(JOBS / name, engine=engine, overrides=[f"output.path={out}", *overrides])
    return report, pq.read_table(out / "parts").sort_by("row")


def test_summarize_job(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """The main job gives real sentences, token counts and load from a real model."""
    _run_job("summarize.yaml", smollm, tmp_path / "first", "input.limit=1", "sampling.max_new_tokens=1")
    few = ("input.limit=4", "sampling.max_new_tokens=32")
    report, table = _run_job("summarize.yaml", smollm, tmp_path / "run", *few)
    assert (report.exit_code, report.rows_ok, report.simulated) == (0, 4, False)
    assert all(len(text.split()) > 3 for text in table["output"].to_pylist())
    assert min(table["prompt_tokens"].to_pylist()) > 20
    assert max(table["cached_tokens"].to_pylist()) > 0  # the rows share their system prompt
    assert report.engine["version"] == importlib.import_module("sglang.version").__version__
    assert 44 <= report.window <= 32 + 250  # what it runs, and its band


def test_bad_rows_do_not_end_the_run(smollm: batchrunner.OpenEngine) -> None:
    """An over-long row, and rows that SGLang itself would die of, fail alone; the others are answered."""
    texts = ["The capital of France is", "", "word " * 6000, None, "Paris is the capital of"]
    table = batchrunner.generate(
        pa.table({"text": pa.array(texts)}),
        prompt={"text": "text"},
        engine=smollm,
        sampling={"max_new_tokens": 8, "temperature": 0},
        limits={"max_failed_rows": 5},
    )
    errors = table["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, False, True]
    assert "longer than the model's context length" in errors[2]
    assert "Paris" in table["output"][0].as_py()

    ids = pa.array([[504, 3575, 282], [10_000_000], [-1], []], type=pa.list_(pa.int64()))
    table = batchrunner.generate(
        pa.table({"ids": ids}),
        prompt={"input_ids": "ids"},
        engine=smollm,
        sampling={"max_new_tokens": 4, "ignore_eos": True},
        limits={"max_failed_rows": 5},
    )
    assert [error is None for error in table["error"].to_pylist()] == [True, False, False, False]


BEGINNINGS = (
    "The capital of France",
    "日本語の",
    "Zürich liegt",
    "👩‍👩‍👧 means",
    "def f(x):\n",
    "1, 2, 3,",
    "Ελλ",
)


@pytest.mark.usefixtures("full_requests")
def test_rows_that_share_requests_have_the_same_answers(
    smollm: batchrunner.OpenEngine, tmp_path: Path
) -> None:
    """Byte for byte, whatever ends an answer; a row that the server refuses fails alone."""
    rows = 42
    table = pa.table({
        "text": [f"{BEGINNINGS[n % 7]} {n}" for n in range(rows)],
        "most": [1 + n % 24 for n in range(rows)],
        "least": [50 if n == 17 else 0 for n in range(rows)],  # more than the most: SGLang refuses it
    })  # fmt: skip
    pq.write_table(table, tmp_path / "input.parquet")

    def run(bundle: str) -> tuple[Any, list[dict[str, Any]]]:
        job = {
            "input": {"path": str(tmp_path / "input.parquet")},
            "prompt": {"text": "text"},
            "sampling": {
                "max_new_tokens": {"column": "most"}, "min_new_tokens": {"column": "least"},
                "temperature": 0, "stop": [" the", "\n\n", "3, 4"],
            },
            "output": {"path": str(tmp_path / f"run-{bundle}")},
            "engine": smollm.spec,
            "tokenize": "client", "order": "input", "window": 32, "bundle": bundle,
            "limits": {"max_failed_rows": 1},
        }  # fmt: skip
        report = batchrunner.run(job, engine=smollm)
        assert (report.exit_code, report.rows_failed) == (0, 1)
        found = pq.read_table(tmp_path / f"run-{bundle}" / "parts").sort_by("row").to_pylist()
        same = ("row", "output", "finish_reason", "prompt_tokens", "completion_tokens", "attempts")
        return report, [{**{name: row[name] for name in same}, "failed": bool(row["error"])} for row in found]

    report, together = run("16")
    assert report.bundles["most_rows"] > 8
    assert report.bundles["rows_resent"] > 0
    report, alone = run("off")
    assert report.bundles["most_rows"] == 1
    assert together == alone
    assert len({row["finish_reason"] for row in alone}) > 1


def test_a_batch_file(smollm: batchrunner.OpenEngine, tmp_path: Path) -> None:
    """Whole requests of OpenAI's batch format are answered as online, and load with the types of `openai`."""
    from openai.types.chat import ChatCompletion  # noqa: PLC0415 - it comes with SGLang

    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "out", "schema": schema, "strict": True}}
    chat = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
    bodies: dict[str, dict[str, Any]] = {
        "two": {**chat, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": True},
        "json": {**chat, "response_format": form},
        "wrong": {**chat, "max_tokens": 10**6},
    }
    requests, results, errors = (tmp_path / f"{name}.jsonl" for name in ("requests", "results", "errors"))
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in bodies.items()
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = tmp_path / "base.yaml"
    base.write_text(f"engine: {{kind: server, model: {SMALL_MODEL}, device: cpu}}\n")
    job = job_of_batch(str(requests), f"{results}.run", engine=[str(base)], overrides=())
    report = batchrunner.run(job, engine=smollm)
    assert (report.rows_ok, report.rows_failed) == (2, 1), report.failures
    # the command finds all lines done in its run directory, and starts no engine
    done = batchrun("batch", requests, "-o", results, "--errors", errors, "--engine", base)
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    two, parsed = (ChatCompletion.model_validate(line["response"]["body"]) for line in found)
    assert (len(two.choices), two.model) == (2, "gpt-4o-mini")
    logprobs = two.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    assert (parsed.choices[0].message.content or "").startswith("{")  # held to the schema
    failed = json.loads(errors.read_text())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("wrong", 400)


COLUMNS = ["output_ids", "logprobs", "top_logprobs", "prompt_logprobs"]


def test_whole_answers(smollm: batchrunner.OpenEngine) -> None:
    """Token ids and probabilities are those of the engine's tokens."""
    rows = pa.table({"ids": [[504, 3575, 282], [28, 216, 34], [1, 2, 3]]})
    sampling = {"max_new_tokens": 6, "temperature": 0}
    table = batchrunner.generate(
        rows, prompt={"input_ids": "ids"}, engine=smollm, sampling=sampling, answers=COLUMNS
    )
    for row in table.to_pylist():
        assert row["error"] is None
        assert len(row["output_ids"]) == len(row["logprobs"]) == row["completion_tokens"]
        assert [token["id"] for token in row["logprobs"]] == row["output_ids"]
        assert all(token["logprob"] <= 0 and token["token"] is not None for token in row["logprobs"])
        assert [top[0]["id"] for top in row["top_logprobs"]] == row["output_ids"]  # greedy
        assert len(row["prompt_logprobs"]) == row["prompt_tokens"]
        assert row["prompt_logprobs"][0]["logprob"] is None


def _tool(name: str, key: str, *values: str) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": {key: {"enum": [*values]}}, "required": [key],
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool("get_weather", "city", "Bern", "Rome"), _tool("get_time", "zone", "UTC")]


def test_tools_that_must_be_called(smollm: batchrunner.OpenEngine) -> None:
    """SGLang holds the answer to calls of the row's own tools."""
    is_call = {"expression": "finish_reason == 'tool_calls'", "tries": 4}
    rows = pa.table({"tools": [json.dumps(TOOLS[:1]), json.dumps(TOOLS[1:]), None]})
    prompt = {"user": "Call a tool.", "tools": "tools"}
    sampling = {"max_new_tokens": 64, "temperature": 0, "tool_choice": "required"}
    mixed = batchrunner.generate(
        rows, prompt=prompt, engine=smollm, sampling=sampling, limits={"max_failed_rows": 1},
        accept={**is_call, "expression": f"{is_call['expression']} or not tools"},
    ).to_pylist()  # fmt: skip
    for row, name, arguments in (
        (mixed[0], "get_weather", [{"city": "Bern"}, {"city": "Rome"}]),
        (mixed[1], "get_time", [{"zone": "UTC"}]),
    ):
        assert (row["error"], row["finish_reason"], row["output"]) == (None, "tool_calls", "")
        for call in row["tool_calls"]:
            assert (call["type"], call["function"]["name"]) == ("function", name)
            assert json.loads(call["function"]["arguments"]) in arguments
    assert (mixed[2]["error"], mixed[2]["tool_calls"]) == (None, None)  # it has no tools
    assert mixed[2]["output"]
