"""`batchrun serve` on the real SGLang, with OpenAI's client and the page in a browser.

One engine with a tiny random model answers all tests of this file, so its answers mean nothing.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from tests.conftest import SMALL_MODEL, eventually, require_engine
from tests.e2e.test_batch_files import CHAT, COMPLETIONS
from tests.e2e.test_page_in_browser import FAINT, TOO_WIDE
from tests.e2e.test_serve import Server, serving
from tests.e2e.test_serve_page import SHOWN, assert_only_from, complaints_of, page_of
from tests.support.engine_processes import START_S, scheduler_of
from tests.support.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
RESPONSES, SCORE = "/v1/responses", "/v1/score"
RUNNING = 8
"""Number of requests that the engine runs at once."""
OPTIONS = (
    "engine.device=cpu",
    f"engine.args.max-running-requests={RUNNING}",
    # A random model under a schema may write blanks for ever.
    "engine.args.constrained-json-disable-any-whitespace=true",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["mood", "stars"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "How was it?"}]
CHATS = 10_000
"""Number of requests of a batch that takes minutes on any machine, although each request soon ends."""
CHAT_BODY = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True}


class Scores(BaseModel):
    """Body of an answer of /v1/score, which OpenAI's API lacks."""

    model_config = ConfigDict(extra="allow")

    object: str
    scores: list[list[float]]


TYPES: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletion,
    COMPLETIONS: Completion,
    RESPONSES: Response,
    SCORE: Scores,
}
"""Type of the answers of each endpoint."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has started its own engine."""
    require_engine("sglang")
    directory = tmp_path_factory.mktemp("serve")
    model = make_tiny_llama(directory / "model", SMALL_MODEL)
    options = [word for option in OPTIONS for word in ("--set", option)]
    with serving(directory / "state", *options, engine=str(model)) as served:
        yield served
        assert served.kill(signal.SIGTERM) == 0


def begin(server: Server, endpoint: str, bodies: list[dict[str, Any]]) -> Batch:
    """Create a batch of these bodies, whose lines are named by their numbers."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": "any", **body}}
        for number, body in enumerate(bodies)
    ]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)
    return server.begin(server.upload(content.encode()), endpoint=endpoint)


def lines_of(server: Server, file: str | None) -> dict[int, dict[str, Any]]:
    """Return the lines of a file of results by their custom_id; {} without a file."""
    return {int(line["custom_id"]): line for line in (server.lines_of(file) if file else [])}


def answers_of(server: Server, batch: Batch, refused: set[int]) -> dict[int, Any]:
    """Return the answers of a batch, which are of OpenAI's type, by their custom_id.

    Exactly the lines `refused` failed, each with the engine's own reason. The batch's usage is the sum of
    that of its answers.
    """
    batch = server.ended(batch)
    assert batch.status == "completed", batch
    failed = lines_of(server, batch.error_file_id)
    assert {*failed} == refused
    for line in failed.values():
        assert (line["response"]["status_code"], line["error"]["code"]) == (400, "invalid_request")
        assert line["error"]["message"].removeprefix("400: ")
    bodies = {
        number: line["response"]["body"] for number, line in lines_of(server, batch.output_file_id).items()
    }
    counts = {"total": len(bodies) + len(failed), "completed": len(bodies), "failed": len(failed)}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == counts
    assert batch.usage is not None
    used = [body["usage"] for body in bodies.values()]
    for ours, names in (
        (batch.usage.input_tokens, ("prompt_tokens", "input_tokens")),
        (batch.usage.output_tokens, ("completion_tokens", "output_tokens")),
        (batch.usage.total_tokens, ("total_tokens",)),
    ):
        assert ours == sum(usage[name] for usage in used for name in names if name in usage)
    assert batch.usage.input_tokens > 0
    return {number: TYPES[batch.endpoint].model_validate(body) for number, body in bodies.items()}


def health_of(server: Server) -> tuple[int, int, float]:
    """Return the status of /health, that of /ready, and the metric of readiness."""
    address = server.url.removesuffix("v1")
    health, ready, metrics = (
        httpx.get(address + path, trust_env=False) for path in ("health", "ready", "metrics")
    )
    (value,) = [
        line.split()[-1] for line in metrics.text.splitlines() if line.startswith("batchrunner_serve_ready ")
    ]
    return health.status_code, ready.status_code, float(value)


def test_chat_completions(server: Server) -> None:
    """Limits, a schema, log probabilities and several answers, beside lines that the engine refuses."""
    answers = answers_of(
        server,
        begin(server, CHAT, [
            {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True},
            {"messages": MESSAGES, "max_completion_tokens": 7, "ignore_eos": True},
            {"messages": MESSAGES, "max_tokens": 60, "response_format": {
                "type": "json_schema", "json_schema": {"name": "opinion", "schema": SCHEMA, "strict": True},
            }},
            {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2},
            {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True, "n": 2},
            {"messages": MESSAGES, "max_tokens": 4, "stream": True, "stream_options": {}},
            {"messages": MESSAGES, "max_tokens": -5},
            {"messages": "not a list"},
            {"messages": MESSAGES, "temperature": "hot"},
            {"messages": [{"role": "user", "content": "word " * 9000}]},
        ]),
        refused={6, 7, 8, 9},
    )  # fmt: skip
    assert [answers[number].usage.completion_tokens for number in (0, 1)] == [5, 7]
    assert [answers[number].choices[0].finish_reason for number in (0, 1)] == ["length", "length"]
    opinion = json.loads(answers[2].choices[0].message.content)
    assert opinion.keys() == {"mood", "stars"}
    tokens = answers[3].choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]
    assert all(token.logprob < 0 for token in tokens)
    assert [choice.index for choice in answers[4].choices] == [0, 1]
    assert answers[4].usage.completion_tokens == 6


def test_completions(server: Server) -> None:
    """Texts, several prompts, token ids and log probabilities; an empty prompt fails alone."""
    batch = server.ended(
        begin(server, COMPLETIONS, [
            {"prompt": "It was", "max_tokens": 5, "ignore_eos": True},
            {"prompt": ["It was", "It is"], "max_tokens": 3, "ignore_eos": True, "n": 2},
            {"prompt": [504, 3575, 282], "max_tokens": 3, "ignore_eos": True, "logprobs": 2},
            {"prompt": "It was", "max_tokens": 3, "echo": True},
            {"prompt": "It was", "max_tokens": "many"},
        ])
    )  # fmt: skip
    answers = answers_of(server, batch, refused={4})
    assert answers[0].usage.completion_tokens == 5
    assert [choice.index for choice in answers[1].choices] == [0, 1, 2, 3]
    assert (answers[1].usage.completion_tokens, answers[2].usage.prompt_tokens) == (12, 3)
    assert len(answers[2].choices[0].logprobs.top_logprobs) == 3
    assert answers[3].choices[0].text.startswith("It was")


def test_responses(server: Server) -> None:
    """A text, messages with instructions, and a schema; what needs a store of responses is refused."""
    answers = answers_of(
        server,
        begin(server, RESPONSES, [
            {"input": "How was it?", "max_output_tokens": 8},
            {"input": MESSAGES, "instructions": "Be brief.", "max_output_tokens": 8},
            {"input": "How was it?", "max_output_tokens": 60, "text": {
                "format": {"type": "json_schema", "name": "opinion", "schema": SCHEMA, "strict": True},
            }},
            {"input": "How was it?", "background": True},
            {"input": "How was it?", "max_output_tokens": -5},
        ]),
        refused={3, 4},
    )  # fmt: skip
    assert all(0 < answers[number].usage.output_tokens <= 8 for number in (0, 1))
    assert json.loads(answers[2].output_text).keys() == {"mood", "stars"}


def test_scores(server: Server) -> None:
    """A generating model scores labels after each item; a label outside its vocabulary is refused."""
    labels = {"label_token_ids": [1, 2], "apply_softmax": True}
    answers = answers_of(
        server,
        begin(server, SCORE, [
            {"query": "Is it good? ", "items": ["It was.", "It is."], **labels},
            {"query": "Is it good? ", "items": ["It was."], **labels, "label_token_ids": [10**9]},
        ]),
        refused={1},
    )  # fmt: skip
    assert [pytest.approx(1.0) == sum(scores) for scores in answers[0].scores] == [True, True]


@pytest.mark.parametrize(
    "endpoint", ["/v1/embeddings", "/v1/classify", "/v1/rerank", "/v1/audio/transcriptions"]
)
def test_endpoints_of_other_models(server: Server, endpoint: str) -> None:
    """A generating model has no such endpoint: no batch begins for it, nor with a line for it."""
    with pytest.raises(openai.BadRequestError, match="supported are /v1/chat/completions"):
        begin(server, endpoint, [{"input": "It was."}])
    line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": {"input": "It was."}}
    batch = server.ended(server.begin(server.upload(json.dumps(line).encode())))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [("invalid_url", 1)]


def done_of(server: Server, batch: Batch) -> int:
    """Return how many lines of a batch have an answer."""
    counts = server.client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return int(counts.completed)


def check_partial_results(server: Server, batch: Batch) -> None:
    """Fail unless a cancelled batch has some answers, of OpenAI's type, and each other line has an error."""
    batch = server.ended(batch)
    assert batch.status == "cancelled"
    output, errors = lines_of(server, batch.output_file_id), lines_of(server, batch.error_file_id)
    assert output
    assert sorted([*output, *errors]) == [*range(CHATS)]
    for line in output.values():
        ChatCompletion.model_validate(line["response"]["body"])
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert batch.usage is not None
    assert batch.usage.output_tokens == 60 * len(output)


def test_a_cancelled_batch(server: Server) -> None:
    """Its finished lines are in the output, the others in the errors; the engine is free again."""
    batch = begin(server, CHAT, [CHAT_BODY] * CHATS)
    eventually(lambda: done_of(server, batch), every_s=0.1)
    assert server.client.batches.cancel(batch.id).status == "cancelling"
    check_partial_results(server, batch)
    answers_of(server, begin(server, CHAT, [CHAT_BODY] * 5), refused=set())


@pytest.mark.browser
async def test_the_page(server: Server, tmp_path: Path) -> None:
    """The page shows the progress, the tokens and the load that the engine reports, and cancels."""
    batch = begin(server, CHAT, [CHAT_BODY] * CHATS)
    async with page_of(server, tmp_path / "profile") as page:
        await page.wait_for(SHOWN)
        figures = 'document.querySelector("#running .figures")?.innerText'
        await page.wait_for(f"/^[1-9]\\d* of {CHATS:,} requests.* left.* tokens.* tokens.s/.test({figures})")
        address = server.url + "/activity"

        def is_loaded() -> bool:
            load = httpx.get(address, trust_env=False).json()["load"]
            is_full = load["running"][-1] == RUNNING and load["queue"][-1] > 0
            return bool(is_full and load["token_usage"][-1] > 0 and load["output_tokens_per_s"][-1] > 0)

        eventually(is_loaded, every_s=0.1)
        tiles = 'document.querySelector("#tiles").innerText'
        await page.wait_for(f"/\\b{RUNNING} running/.test({tiles})")
        assert "1 running" in await page.run(tiles)
        assert "simulated" not in await page.run("document.body.innerText")
        await page.wait_for('document.querySelectorAll("#load path.line[d^=M]").length == 5')
        assert await page.run(TOO_WIDE) == []
        assert await page.run(FAINT) == []
        await page.picture(tmp_path / "page.png")
        for _ in range(2):
            await page.run('document.querySelector("#running .cancel").click()')
        await page.wait_for('document.querySelector("#all").innerText.includes("cancelled")')
        assert complaints_of(page) == []
        assert_only_from(server, page)
    check_partial_results(server, batch)


@pytest.mark.long
def test_the_engine_dies(server: Server) -> None:
    """A killed engine is started again: meanwhile the server is alive, not ready, and loses no line."""
    assert health_of(server) == (200, 200, 1.0)
    batch = begin(server, CHAT, [CHAT_BODY] * 200)
    eventually(lambda: done_of(server, batch), every_s=0.1)
    os.kill(scheduler_of(server.process), signal.SIGKILL)
    eventually(lambda: health_of(server) == (200, 503, 0.0), every_s=0.1)
    assert server.client.batches.retrieve(batch.id).status == "in_progress"
    later = begin(server, CHAT, [CHAT_BODY] * 5)
    eventually(lambda: health_of(server) == (200, 200, 1.0), START_S, every_s=0.5)
    assert {*answers_of(server, batch, refused=set())} == {*range(200)}
    assert {*answers_of(server, later, refused=set())} == {*range(5)}
