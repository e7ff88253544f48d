"""`batchrun batch`: whole requests in, whole answers out, in OpenAI's batch format."""

import base64
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import Result

from tests.conftest import batchrun, eventually, started
from tests.support.answers import Body, OnWire
from tests.support.fake_sglang import FakeSGLang, Sent

SIMULATED = ("--engine", "simulated", "--set", "engine.step_s=0")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request_of(
    number: int, *, url: str = CHAT, model: str | None = "fake/model", **body: Any
) -> dict[str, Any]:
    """Return a request for an endpoint."""
    text = f"question {number}"
    prompt = {"messages": [{"role": "user", "content": text}]} if url == CHAT else {"prompt": text}
    named = {} if model is None else {"model": model}
    return {
        "custom_id": f"request-{number}", "method": "POST", "url": url, "body": {**named, **prompt, **body},
    }  # fmt: skip


def write_batch(path: Path, lines: Iterable[Any]) -> Path:
    """Write a batch file; a line that is no text becomes JSON."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes("".join(f"{text}\n" for text in texts).encode(errors="surrogateescape"))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Batch:
    """A batch file and its results in a directory."""

    def __init__(self, directory: Path, lines: Iterable[Any]) -> None:
        self.requests = write_batch(directory / "requests.jsonl", lines)
        self.results = directory / "results.jsonl"
        self.errors = directory / "errors.jsonl"
        self.run = directory / "results.jsonl.run"

    def do(self, *options: object, engine: FakeSGLang | None = None) -> Result:
        """Run the command on an engine, by default a simulated one."""
        on = SIMULATED if engine is None else ("--engine", engine.url)
        return batchrun("batch", self.requests, "-o", self.results, *on, *options)


def test_a_file_goes_in_and_comes_out(server: FakeSGLang, tmp_path: Path) -> None:
    """Bodies reach their endpoints as they are, with a `rid`; answers come whole, in the requests' order."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    odd: dict[str, Any] = {"seed": 2**70, "temperature": 0.10, "n": 2, "tools": [tool], "top_k": 3}
    requests = [
        request_of(0, **odd),
        request_of(1, url=COMPLETIONS),
        request_of(2, response_format={"type": "text"}),
    ]
    batch = Batch(tmp_path, requests)
    result = batch.do(engine=server)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(batch.results)
    sent = sorted(server.sent, key=lambda sent: sent.row)
    assert len({each.body.pop("rid") for each in sent}) == 3
    assert [(each.path, each.body) for each in sent] == [(each["url"], each["body"]) for each in requests]
    lines = lines_of(batch.results)
    assert [line["custom_id"] for line in lines] == [request["custom_id"] for request in requests]
    assert len({line["id"] for line in lines}) == 3
    for line in lines:
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert list(line["response"]) == ["status_code", "request_id", "body"]
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["body"]["metadata"] == {"weight_version": "default"}  # SGLang's own field


def test_the_name_of_the_model(server: FakeSGLang, tmp_path: Path) -> None:
    """A name is passed on as it is; one line says which model answers for a name that is not its own."""
    batch = Batch(tmp_path, [request_of(i, model="gpt-4o-mini") for i in range(5)])
    result = batch.do(engine=server)
    assert result.exit_code == 0
    said = "requests for the model 'gpt-4o-mini' are answered by fake/model"
    assert result.stderr.count(said) == 1
    assert {sent.body["model"] for sent in server.sent} == {"gpt-4o-mini"}
    assert {line["response"]["body"]["model"] for line in lines_of(batch.results)} == {"gpt-4o-mini"}
    own = Batch(tmp_path, [request_of(0, model="fake/model"), request_of(1, model=None)])
    assert "are answered by" not in own.do("--fresh", engine=server).stderr


ADAPTERS = {
    "fake/model:french": "fake/model:french",
    "of/the/file:french": "of/the/file:french",
    "french": "default:french",
}
"""Names by which a file may ask for an adapter, and what the server gets."""


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_the_name_of_an_adapter(server: FakeSGLang, tmp_path: Path, name: str, url: str) -> None:
    """The adapter answers, whatever the base model is called in the file; never the base in its place."""
    server.adapters = {"french"}
    batch = Batch(tmp_path, [request_of(n, url=url, model=name) for n in range(3)])
    result = batch.do(engine=server)
    assert (result.exit_code, "are answered by" in result.stderr) == (0, False)
    assert {sent.body["model"] for sent in server.sent} == {ADAPTERS[name]}
    lines = lines_of(batch.results)
    assert [(line["error"], line["response"]["body"]["model"]) for line in lines] == [(None, name)] * 3


@pytest.mark.parametrize("name", ["gpt-4o-mini", "fake/model", *ADAPTERS])
def test_the_name_of_the_model_of_a_response(server: FakeSGLang, tmp_path: Path, name: str) -> None:
    """/v1/responses checks the name, so it gets its own; it ignores adapters, so their lines fail."""
    server.adapters = {"french"}
    server.script = lambda _: Body(json.dumps(ENDPOINTS["/v1/responses"][1]).encode())
    request = {**request_of(0), "url": "/v1/responses", "body": {"model": name, "input": "a"}}
    batch = Batch(tmp_path, [request])
    assert batch.do(engine=server).exit_code == 0
    (line,) = lines_of(batch.results)
    if name in ADAPTERS:
        assert (line["error"]["code"], server.sent) == ("request_failed", [])
        assert f"model {name!r}: /v1/responses of SGLang ignores LoRA adapters" in line["error"]["message"]
    else:
        assert (line["response"]["status_code"], server.sent[0].body["model"]) == (200, "fake/model")


def test_an_adapter_that_the_server_lacks(server: FakeSGLang, tmp_path: Path) -> None:
    """Each line fails with the server's own words."""
    server.adapters = {"german"}
    batch = Batch(tmp_path, [request_of(n, model="of/the/file:french") for n in range(2)])
    assert batch.do(engine=server).exit_code == 0
    for line in lines_of(batch.results):
        assert (line["error"]["code"], line["response"]["status_code"]) == ("invalid_request", 400)
        assert "LoRA adapter that has never been loaded" in line["error"]["message"]


def test_answers_come_whole(server: FakeSGLang, tmp_path: Path) -> None:
    """`stream` is left out of what is sent; an answer is one line."""
    pretty = json.dumps({"choices": [{"message": {"content": "a\nb"}}], "big": 2**70, "usage": {}}, indent=1)
    server.script = lambda _: Body(pretty.replace('"big"', '"half": 1.50,\n "big"').encode())
    batch = Batch(tmp_path, [request_of(0, stream=True, stream_options={"include_usage": True})])
    assert batch.do(engine=server).exit_code == 0
    assert not {"stream", "stream_options"} & set(server.sent[0].body)
    (line,) = batch.results.read_text().splitlines()
    assert f'"half":1.50,"big":{2**70}' in line


def test_a_result_is_one_line(server: FakeSGLang, tmp_path: Path) -> None:
    """An answer and a custom_id with characters that some readers take for the end of a line."""
    odd = "a\x85b\u2028c\u2029d"
    content = f'{{"choices": [{{"message": {{"content": "{odd}"}}}}], "usage": {{}}}}'
    server.script = lambda sent: Body(content.encode()) if sent.row else "too long"
    batch = Batch(tmp_path, [{**request_of(n), "custom_id": f"{odd}{n}"} for n in range(2)])
    assert batch.do(engine=server).exit_code == 0
    refused, answered = lines_of(batch.results)
    assert (refused["custom_id"], answered["custom_id"]) == (f"{odd}0", f"{odd}1")
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == odd


def _chat(content: str, logprobs: str = "null") -> Body:
    message = f'{{"role": "assistant", "content": "{content}"}}'
    choice = f'{{"index": 0, "message": {message}, "finish_reason": "stop", "logprobs": {logprobs}}}'
    return Body(f'{{"choices": [{choice}], "usage": {{}}}}'.encode("utf-8", "surrogatepass"))


def test_answers_that_json_cannot_write(server: FakeSGLang, tmp_path: Path) -> None:
    """Half a surrogate pair, NaN, infinities, numbers over a double: the line is ok, and all can read it."""
    bodies = {
        0: _chat("\\ud800 half"),
        1: _chat("\ud800 half"),
        2: _chat("a", '{"content": [{"logprob": NaN}, {"logprob": -Infinity}, {"logprob": -0.5}]}'),
        3: _chat("a", '{"content": [{"logprob": 1e999}, {"logprob": -1e999}, {"logprob": -0.5}]}'),
    }
    server.script = lambda sent: bodies.get(sent.row, "answer")
    batch = Batch(tmp_path, [request_of(n) for n in range(6)])
    result = batch.do(engine=server)
    assert result.exit_code == 0, result.stderr
    lines = [orjson.loads(line) for line in batch.results.read_bytes().splitlines()]
    assert [line["error"] for line in lines] == [None] * 6
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    assert [choice["message"]["content"] for choice in choices[:2]] == ["\ufffd half"] * 2
    for choice in choices[2:4]:
        nothing, least, usual = (token["logprob"] for token in choice["logprobs"]["content"])
        assert (nothing, usual) == (None, -0.5)
        assert math.exp(least) == 0


def _refuse(sent: Sent) -> Any:
    return {1: "too long", 2: "broken 500", 3: "abort", 4: "no answer"}.get(sent.row, "answer")


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("to_errors", [True, False])
def test_failed_lines(server: FakeSGLang, tmp_path: Path, *, to_errors: bool) -> None:
    """Lines that fail go to the errors, or into the results, and the exit code is 0."""
    server.script = _refuse
    batch = Batch(tmp_path, [request_of(i) for i in range(8)])
    result = batch.do(*(["--errors", batch.errors] if to_errors else []), "--json", engine=server)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["results"], report["path"]) == (str(batch.results), str(batch.run))
    assert report["errors"] == (str(batch.errors) if to_errors else None)
    lines = lines_of(batch.results)
    failed = lines_of(batch.errors) if to_errors else [line for line in lines if line["error"]]
    assert len(lines) == (4 if to_errors else 8)
    statuses = [line["response"] and line["response"]["status_code"] for line in failed]
    assert statuses == [400, 500, statuses[2], None]
    codes = ["invalid_request", "request_failed", "request_failed", "request_failed"]
    assert [line["error"]["code"] for line in failed] == codes
    server.script = lambda _: "answer"
    assert batch.do("--retry-failed", engine=server).exit_code == 0
    assert [line["error"] for line in lines_of(batch.results)] == [None] * 8


SGLANG_SAYS = {
    "object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400,
}  # fmt: skip
OPENAI_SAYS = {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}}
MADE_HERE = {"type": "invalid_request", "code": 400}
BODIES: dict[str, tuple[str, Any]] = {
    "SGLang's": (json.dumps(SGLANG_SAYS, indent=1), {"error": SGLANG_SAYS}),
    "OpenAI's": (json.dumps(OPENAI_SAYS), OPENAI_SAYS),
    "another": (
        '{"detail": "n is 0", "at": [1]}',
        {"detail": "n is 0", "at": [1], "error": {"message": "n is 0", **MADE_HERE}},
    ),
    "a password": (
        '{"detail": "x://b", "at": ["d@e"]}',
        {"error": {"message": "x://b", **MADE_HERE}},
    ),
    "half a pair": (
        r'{"message": "half \ud800", "at": NaN}',
        {"error": {"message": "half \ufffd", "at": None}},
    ),
    "a page": ("<html>no</html>", {"error": {"message": "<html>no</html>", **MADE_HERE}}),
}


@pytest.mark.usefixtures("quick_retries")
def test_the_server_s_own_error_is_kept(server: FakeSGLang, tmp_path: Path) -> None:
    """A line that the server refused has its status and its body, as OpenAI writes them."""
    bodies = [body.encode() for body, _ in BODIES.values()]

    def refuse(sent: Sent) -> OnWire:
        body = bodies[sent.row]
        return OnWire(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    server.script = refuse
    urls = [CHAT, COMPLETIONS] * len(BODIES)
    batch = Batch(tmp_path, [request_of(i, url=urls[i]) for i in range(len(BODIES))])
    assert batch.do("--errors", batch.errors, engine=server).exit_code == 0
    lines = lines_of(batch.errors)
    found = {name: line["response"]["body"] for name, line in zip(BODIES, lines, strict=True)}
    assert found == {name: body for name, (_, body) in BODIES.items()}
    assert {line["response"]["status_code"] for line in lines} == {400}


GOOD = request_of(0)
BAD: list[tuple[Any, str]] = [
    ('{"custom_id": "a", ', "Input data was truncated"),
    ("[1, 2]", "Expected `object`, got `array`"),
    ('{"custom_id": "\udcff"}', "'utf-8' codec can't decode byte"),
    ({**GOOD, "custom_id": "b", "body": [1]}, "Expected `object`, got `array`"),
    (
        {**request_of(0, model="other"), "custom_id": "c"},
        "model 'other', but an earlier line names 'fake/model'",
    ),
]


def test_bad_lines(tmp_path: Path) -> None:
    """Each fails alone, and says its number."""
    good = [GOOD, "", request_of(1, model=None), request_of(2)]
    batch = Batch(tmp_path, [*good, *(line for line, _ in BAD)])
    done = batch.do("--errors", batch.errors)
    assert done.exit_code == 0, done.stderr
    bad = f"{batch.requests.name}: lines 5, 6, 7, 8, 9 will fail: not a request: "
    assert bad in done.stderr.splitlines()[0]
    assert [found["custom_id"] for found in lines_of(batch.results)] == [
        "request-0",
        "request-1",
        "request-2",
    ]
    failed = lines_of(batch.errors)
    assert [line["custom_id"] for line in failed] == [None] * 3 + ["b", "c"]
    for number, (line, (_, problem)) in enumerate(zip(failed, BAD, strict=True), 5):
        assert (line["response"], line["error"]["code"]) == (None, "invalid_request")
        assert f"line {number}: not a request: " in line["error"]["message"]
        assert problem in line["error"]["message"]


def test_repeated_custom_ids(tmp_path: Path) -> None:
    """They are refused with their lines, also by `check`; with --allow-repeated each line is answered."""
    names = ["a", "b", "a", "", *(f"n{n}" for n in range(7)), "b", *(f"n{n}" for n in range(7)), "once"]
    lines = [{**request_of(n), "custom_id": name} if name else "" for n, name in enumerate(names)]
    batch = Batch(tmp_path, lines)
    said = (
        f"batchrun: {batch.requests.name}: repeated custom_ids: "
        "'a' on lines 1, 3; 'b' on lines 2, 12; 'n0' on lines 5, 13; 'n1' on lines 6, 14; "
        "'n2' on lines 7, 15; and 4 more: give each line a custom_id of its own, or add --allow-repeated"
    )
    refused = batch.do()
    assert (refused.exit_code, refused.stderr.strip()) == (2, said)
    assert not batch.run.exists()
    checked = batchrun("check", batch.requests)
    assert (checked.exit_code, checked.stderr.strip()) == (2, said)
    assert batch.do("--allow-repeated").exit_code == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == [name for name in names if name]
    write_batch(batch.requests, [request_of(n) for n in range(3)])
    assert batchrun("check", batch.requests).stderr == ""


def test_custom_ids_that_are_no_text(server: FakeSGLang, tmp_path: Path) -> None:
    """The file is refused with the lines of each fault, before anything is sent."""
    nameless = {name: value for name, value in request_of(4).items() if name != "custom_id"}
    wrong = [{**request_of(n), "custom_id": name} for n, name in enumerate((7, None, "", ["a"]), 1)]
    batch = Batch(tmp_path, [GOOD, *wrong, nameless, request_of(0, url="/v1/images"), GOOD])
    refused = batch.do("--allow-repeated", engine=server)
    of_ids, of_urls = refused.stderr.splitlines()
    assert refused.exit_code == 2
    assert (
        f"{batch.requests.name}: lines 2, 3, 4, 5, 6: custom_id should be a text that is not empty" in of_ids
    )
    assert f"{batch.requests.name}: line 7: url should be " in of_urls
    assert len(batch.do(engine=server).stderr.splitlines()) == 3  # and the repeated one
    assert not server.requests


ENDPOINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/responses": (
        {"input": "a", "instructions": "b", "max_output_tokens": 5},
        {"object": "response", "status": "incomplete", "output": [{"type": "message"}],
         "usage": {"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1}}},
    ),
    "/v1/score": (
        {"query": "", "items": ["a", "b"], "label_token_ids": [1]},
        {"object": "scoring", "scores": [[0.5], [0.25]], "usage": {"prompt_tokens": 3}},
    ),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, [{"score": 0.5, "document": "b", "index": 0}]),
    "/v1/classify": (
        {"input": ["a"]},
        {"object": "list", "data": [{"index": 0, "label": "no"}], "usage": {"prompt_tokens": 3}},
    ),
}  # fmt: skip
"""A body for each endpoint, and an answer of the server."""


@pytest.mark.parametrize("url", ENDPOINTS)
def test_further_endpoints(tmp_path: Path, url: str) -> None:
    """Bodies go to their endpoint, and answers are stored as they come; the simulated engine answers, too."""
    body, answer = ENDPOINTS[url]
    body = {"model": "fake/model", **body}
    lines = [{**request_of(n), "url": url, "body": body} for n in range(3)]
    batch = Batch(tmp_path, lines)
    model = {"is_generation": url in {"/v1/responses", "/v1/score"}}
    with FakeSGLang(arguments=model) as server:
        server.script = lambda _: Body(json.dumps(answer).encode())
        done = batch.do(engine=server)
        assert done.exit_code == 0, done.stderr
        assert [line["response"]["body"] for line in lines_of(batch.results)] == [answer] * 3
        for sent in server.sent:
            sent.body.pop("request_id", None)
            assert (sent.path, sent.body) == (url, body)
        server.script = lambda _: Body(b'{"status": "failed", "output": [], "error": {"message": "no"}}')
        failed = batch.do("--fresh", "--set", "limits.max_attempts=1", engine=server)
        assert failed.exit_code == 0
        assert {line["error"]["code"] for line in lines_of(batch.results)} == {"request_failed"}
    assert batch.do("--fresh").exit_code == 0
    assert {line["response"]["status_code"] for line in lines_of(batch.results)} == {200}


UNANSWERED: list[tuple[list[str], str]] = [
    (
        [CHAT, "/v1/audio", CHAT, "/v1/images"],
        "lines 2, 4: url should be /v1/chat/completions or ",
    ),
    ([*["/v1/moderations"] * 9, CHAT], "lines 1, 2, 3, 4, 5 and 4 more: url should be "),
    (
        [CHAT, COMPLETIONS, "/v1/embeddings"],
        "line 3: url is /v1/embeddings, which needs a model for ",
    ),
    (
        ["/v1/embeddings", COMPLETIONS],
        "line 2: url is /v1/completions, which needs a model for ",
    ),
]


@pytest.mark.parametrize(("urls", "told"), UNANSWERED)
def test_endpoints_that_are_not_answered(tmp_path: Path, urls: list[str], told: str) -> None:
    """The file is refused before anything is sent, in one line that names the lines."""
    batch = Batch(tmp_path, [{**request_of(n), "url": url} for n, url in enumerate(urls)])
    for result in (batch.do(), batchrun("check", batch.requests)):
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"{batch.requests.name}: {told}" in result.stderr
        assert "remove these lines" in result.stderr
    assert not batch.results.exists()
    assert not batch.run.exists()


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone, with its number; the lines around it are answered."""
    monkeypatch.setattr("batchrunner.input.text_lines.LONGEST_LINE_BYTES", 1000)
    long = request_of(1, user="x" * 5000)
    batch = Batch(tmp_path, [request_of(0), long, request_of(2)])
    assert batch.do("--errors", batch.errors).exit_code == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == ["request-0", "request-2"]
    (failed,) = lines_of(batch.errors)
    assert "line 2: not a request: the line is longer than 64 MiB" in failed["error"]["message"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role: should be 'user'"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content: should be a valid string"),
    (CHAT, {"max_completion_tokens": "many"}, "max_completion_tokens: should be a valid integer"),
    (CHAT, {"temperature": -1}, "temperature: should be greater than or equal to 0 (got -1)"),
    (
        CHAT,
        {"min_tokens": 5, "max_tokens": 3},
        "min_new_tokens (5) exceeds max_new_tokens (3)",
    ),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type: should be 'text', 'json_object'"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens: should be greater than or equal to 1 (got 0)"),
    (COMPLETIONS, {"prompt": 5}, "prompt: should be a valid string"),
]
"""Requests that SGLang 0.5.23 refuses with status 400, as its `protocol.py` and `sampling_params.py` say."""
TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": "0", "top_p": None, "seed": 2**40, "lora_path": ["a"], "what": "ever"}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}),
]


def test_requests_that_sglang_refuses(tmp_path: Path) -> None:
    """The simulated engine refuses them with SGLang's status, and `check` finds them without an engine."""
    lines = [request_of(n, url=url, **body) for n, (url, body, _) in enumerate(REFUSED)]
    lines += [request_of(n, url=url, **body) for n, (url, body) in enumerate(TAKEN, len(REFUSED))]
    batch = Batch(tmp_path, lines)
    assert f"{len(REFUSED)} of the first {len(lines)} rows" in batchrun("check", batch.requests).stdout
    assert batch.do("--errors", batch.errors).exit_code == 0
    failed = lines_of(batch.errors)
    assert len(lines_of(batch.results)) == len(TAKEN)
    for line, (_, _, problem) in zip(failed, REFUSED, strict=True):
        assert (line["response"]["status_code"], line["error"]["code"]) == (400, "invalid_request")
        assert problem in line["error"]["message"]
    write_batch(batch.requests, [{"id": 1, "text": "a file of data"}])
    assert f"batchrun init {batch.requests}" in batchrun("check", batch.requests).stderr
    write_batch(batch.requests, [lines[0], "no JSON"])
    assert batchrun("check", batch.requests).exit_code == 3


def test_the_same_command_resumes(server: FakeSGLang, tmp_path: Path) -> None:
    """Killed in the midst, the same command does the rest; the results are those of a run in one go."""
    batch = Batch(tmp_path, [request_of(i, url=(CHAT, COMPLETIONS)[i % 2]) for i in range(300)])
    assert batch.do(engine=server).exit_code == 0
    whole = batch.results.read_bytes()
    batch.results.unlink()
    shutil.rmtree(batch.run)
    server.forget()
    server.script = lambda _: "hold" if len(server.sent) > 100 else "answer"
    with started("batch", batch.requests, "-o", batch.results, "--engine", server.url) as killed:
        server.wait_for(101)
        eventually(lambda: any(batch.run.glob("tasks/main/journal-*")))
        killed.kill()
    assert not batch.results.exists()
    server.script = lambda _: "answer"
    server.answer_held()
    server.forget()  # its answers have the number of the try
    result = batch.do(engine=server)
    assert result.exit_code == 0, result.stderr
    assert batch.results.read_bytes() == whole


def test_another_batch_for_the_same_results(tmp_path: Path) -> None:
    """Another file is refused in one line; more lines are not."""
    batch = Batch(tmp_path, [request_of(i) for i in range(6)])
    for lines in (3, 5):
        assert batch.do("--limit", lines).exit_code == 0
        assert len(lines_of(batch.results)) == lines
    write_batch(batch.requests, [request_of(9)])
    other = batch.do()
    assert (other.exit_code, other.stderr.count("\n")) == (2, 1)
    assert "holds another run" in other.stderr
    assert "use another --output" in other.stderr
    assert batch.do("--fresh").exit_code == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == ["request-9"]


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    """No file is overwritten that the command did not write."""
    batch = Batch(tmp_path, [GOOD])
    batch.results.write_text("precious")
    result = batch.do()
    assert (result.exit_code, batch.results.read_text()) == (2, "precious")
    assert "--fresh to replace the file" in result.stderr
    for target in (batch.requests, batch.results):
        same = batch.do("--errors", target)
        assert (same.exit_code, "give different files" in same.stderr) == (2, True)
        assert f"{target}: requests, results and errors need" in same.stderr
    assert batch.do("--fresh").exit_code == 0
    assert len(lines_of(batch.results)) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-", "-o", "out.jsonl", "--engine", "simulated"], "a batch cannot be read from standard input"),
        (["r.jsonl", "-o", "out.jsonl"], "Missing option '--engine'"),
        (["*.jsonl", "-o", "out.jsonl", "--engine", "simulated"], "the input has 2 batch files"),
        (
            ["r.jsonl", "-o", "o.jsonl", "--engine", "simulated", "--set", "sampling.n=2"],
            "--set sampling.n=2: a batch does not have this field",
        ),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str
) -> None:
    """What is wrong is one line, and exit code 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_batch(Path("r.jsonl"), [GOOD])
    if args[0] == "*.jsonl":
        write_batch(Path("s.jsonl"), [GOOD])
    before = sorted(tmp_path.iterdir())
    result = batchrun("batch", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_tasks_share_a_batch(server: FakeSGLang, tmp_path: Path) -> None:
    """With --join several tasks share the lines, and the results are written when all are done."""
    batch = Batch(tmp_path, [request_of(i) for i in range(600)])
    options = ("batch", batch.requests, "-o", batch.results, "--engine", server.url, "--join")
    server.script = lambda sent: "hold" if sent.row < 10 else "answer"
    with started(*options) as first:
        server.wait_for(20)
        with started(*options) as second:
            server.wait_for(500)
            server.answer_held()
            assert first.end() == 0
            assert second.end() == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == [f"request-{i}" for i in range(600)]
    assert len(server.sent) == 600


def embedding_of(number: int, **body: Any) -> dict[str, Any]:
    """Return a request for vectors."""
    line = request_of(number, url="/v1/embeddings", **body)
    del line["body"]["prompt"]
    return line


INPUTS = ["a text", [5, 6, 7], ["a", "b c", "d"], [[1, 2], [3]]]


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("on_server", [True, False])
def test_embeddings(tmp_path: Path, on_server: bool, encoding: str) -> None:
    """Each line has its vectors as the endpoint writes them, for one input or several."""
    asked: dict[str, Any] = {"dimensions": 4, "encoding_format": encoding}
    batch = Batch(tmp_path, [embedding_of(n, input=given, **asked) for n, given in enumerate(INPUTS)])
    with FakeSGLang(arguments={"is_generation": False}) as embedder:
        result = batch.do("--errors", batch.errors, engine=embedder if on_server else None)
    assert result.exit_code == 0, result.stderr
    assert batch.errors.read_text() == ""
    bodies = [line["response"]["body"] for line in lines_of(batch.results)]
    assert [len(body["data"]) for body in bodies] == [1, 1, 3, 2]
    for item in (item for body in bodies for item in body["data"]):
        found = item["embedding"]
        assert len(base64.b64decode(found)) == 16 if encoding == "base64" else len(found) == 4
    assert {body["model"] for body in bodies} == {"fake/model"}


DEADLY: dict[str, list[Any]] = {
    COMPLETIONS: ["", [], ["fine", ""], [1, -1], [[1], [-5]], [None]],
    "/v1/embeddings": ["", [[1], []], "nan"],
}


@pytest.mark.parametrize("url", DEADLY)
def test_deadly_prompts(tmp_path: Path, url: str) -> None:
    """A prompt that would end the server is not sent, and a vector with NaN is none: the line fails alone."""
    prompts = ["good", *DEADLY[url]]
    if url == COMPLETIONS:
        lines = [request_of(n, url=url, prompt=prompt) for n, prompt in enumerate(prompts)]
    else:
        lines = [embedding_of(n, input=prompt) for n, prompt in enumerate(prompts)]
    batch = Batch(tmp_path, lines)
    with FakeSGLang(arguments={"is_generation": url == COMPLETIONS}) as server:
        server.vector = lambda sent: [math.nan if sent.prompt == "nan" else 0.5]
        assert batch.do("--errors", batch.errors, engine=server).exit_code == 0
    assert set(server.prompts) <= {"good", "nan"}
    assert [line["custom_id"] for line in lines_of(batch.results)] == ["request-0"]
    assert len(lines_of(batch.errors)) == len(DEADLY[url])


def test_a_huge_line_and_a_long_custom_id(tmp_path: Path, server: FakeSGLang) -> None:
    """They go in and come out as any other."""
    long_id, long_text = "i" * 1_000_000, "x " * 1_000_000
    batch = Batch(tmp_path, [{**request_of(0, url=COMPLETIONS, prompt=long_text), "custom_id": long_id}])
    assert batch.do(engine=server).exit_code == 0
    assert [(line["custom_id"], line["error"]) for line in lines_of(batch.results)] == [(long_id, None)]
    assert server.prompts == [long_text]


def test_published_again(tmp_path: Path) -> None:
    """Results that were deleted or changed since are those of the run again; errors may go elsewhere."""
    batch = Batch(tmp_path, [*map(request_of, range(4)), {"custom_id": "bad"}])
    assert batch.do().exit_code == 0
    whole = batch.results.read_bytes()
    batch.results.unlink()
    assert batch.do().exit_code == 0
    assert batch.results.read_bytes() == whole
    batch.results.write_bytes(whole[:100])
    assert batch.do("--errors", batch.errors).exit_code == 0
    assert batch.results.read_bytes() + batch.errors.read_bytes() == whole
