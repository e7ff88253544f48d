"""Prompts become tokens in the client where the server makes the same ones, and else in the server."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import EngineStartError, JobError, RowRefusedError
from tests.conftest import column_of, job_of, log_of, write_rows
from tests.support.fake_sglang import FakeSGLang
from tests.support.tiny_tokenizer import CHATML, END, START, make_tokenizer
from tests.support.tokenizers import ids_of, messages, request


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


@pytest.fixture
def server(model: Path) -> Iterator[FakeSGLang]:
    """A server that tokenises with this model's files, as the real one does."""

    def tokenize(body: dict[str, Any]) -> list[int]:
        one = request(body.get("messages") or body["prompt"], "messages" if "messages" in body else "text")
        one = one._replace(continues=body.get("continue_final_message", False))
        ids = ids_of(model, one)
        if isinstance(ids, RowRefusedError):
            raise ValueError(str(ids))  # noqa: TRY004 - as the fake wants it
        return ids

    with FakeSGLang(model=str(model), arguments={"sampling_defaults": "model"}, tokenize=tokenize) as fake:
        fake.arguments = {**fake.arguments, "tokenizer_path": str(model)}
        yield fake


def sent_text(model: Path, body: dict[str, Any]) -> str:
    """Return the text of the ids that were sent."""
    from tokenizers import Tokenizer as Backend  # noqa: PLC0415

    text: str = Backend.from_file(str(model / "tokenizer.json")).decode(
        body["input_ids"], skip_special_tokens=False
    )
    return text


def where_of(job: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return where prompts were made tokens, and why not here."""
    return [(event["where"], event.get("why")) for event in log_of(job, "tokenize")]


def test_rows_are_sent_as_tokens(server: FakeSGLang, model: Path, tmp_path: Path) -> None:
    """A chat is sent to /generate as ids, with the model's own sampling, which a chat would have got."""
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 1}')
    job = job_of(tmp_path, server, prompt={"user": "Say {{ text }}"}, sampling={"top_k": 5})
    report = batchrunner.run(job)
    assert (report.rows_ok, where_of(job)) == (10, [("client", None)])
    assert {sent.path for sent in server.sent} == {"/generate"}
    assert min(sent_text(model, sent.body) for sent in server.sent) == (
        f"{START}user\nSay row 0{END}\n{START}assistant\n"
    )
    assert server.sent[0].body["sampling_params"] == {"max_new_tokens": 1024, "temperature": 0.6, "top_k": 5}


def test_prompts_of_several_kinds_are_sent_as_tokens(server: FakeSGLang, model: Path, tmp_path: Path) -> None:
    """What a Python function makes of a row tells how it becomes tokens: by the chat template, or without."""

    def prompt(row: dict[str, Any]) -> Any:
        return [row["text"], [{"role": "user", "content": row["text"]}], [5, 6, 7]][row["id"]]

    job = job_of(tmp_path, server, rows=3, prompt={"python": prompt})
    assert batchrunner.run(job).rows_ok == 3
    assert {sent.path for sent in server.sent} == {"/generate"}
    found = [sent.body for sent in server.sent]
    texts = {sent_text(model, body) for body in found if body["input_ids"] != [5, 6, 7]}
    assert (len(found), texts) == (3, {"<s>row 0", f"{START}user\nrow 1{END}\n{START}assistant\n"})
    assert where_of(job).count(("client", None)) == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"reasoning_parser": "qwen3"}, "--reasoning-parser"),
        ({"chat_template": "llama-2"}, "--chat-template"),
        ({"has_image_understanding": True}, "the model accepts images or audio"),
        ({"tokenizer_path": "some/model"}, "some/model is not on this machine"),
    ],
)
def test_a_reason_not_to(arguments: dict[str, Any], why: str, server: FakeSGLang, tmp_path: Path) -> None:
    """Where something would differ the server does it, and the event says why; `client` ends at the start."""
    server.arguments = {**server.arguments, **arguments}
    job = job_of(tmp_path, server, rows=3, prompt={"user": "{{ text }}"})
    assert batchrunner.run(job).rows_ok == 3
    ((where, told),) = where_of(job)
    assert (where, why in str(told)) == ("server", True)
    assert {sent.path for sent in server.sent} == {"/v1/chat/completions"}
    server.forget()
    with pytest.raises(
        EngineStartError, match="tokenize: batchrunner cannot tokenize the prompts itself"
    ) as failure:
        batchrunner.run({**job, "tokenize": "client"}, fresh=True)
    assert (why in str(failure.value), failure.value.exit_code, server.sent) == (True, 2, [])


@pytest.mark.parametrize("kind", ["user", "text"])
def test_a_tokenizer_that_differs_is_found_out(
    kind: str, server: FakeSGLang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that makes other tokens of the first rows gets texts, and the log says so."""
    caplog.set_level(logging.DEBUG, "batchrunner")
    server.tokenize = lambda _: [1, 2, 3]
    job = job_of(tmp_path, server, prompt={kind: "{{ text }}!"})
    assert batchrunner.run(job).rows_ok == 10
    assert "the engine's tokenizer splits row 0 into other tokens" in caplog.text
    assert not any("input_ids" in sent.body for sent in server.sent)
    with pytest.raises(EngineStartError, match="the engine's tokenizer splits row 0 into other tokens"):
        batchrunner.run({**job, "tokenize": "client"}, fresh=True)


@pytest.mark.parametrize("failures", [2, 99])
def test_a_question_that_fails_is_asked_again(
    failures: int, server: FakeSGLang, quick_retries: None, tmp_path: Path
) -> None:
    """A server that is busy or comes up again is asked for a while; then the true reason is told."""
    tokenize, left = server.tokenize, [failures]

    def failing(body: dict[str, Any]) -> list[int]:
        assert tokenize is not None
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("busy")
        return tokenize(body)

    server.tokenize = failing
    job = job_of(tmp_path, server)
    assert batchrunner.run(job).rows_ok == 10
    ((where, why),) = where_of(job)
    assert where == ("client" if failures == 2 else "server")
    assert (why or "").startswith("" if failures == 2 else "the engine failed to tokenize: 500: ")
    if failures == 99:
        with pytest.raises(EngineStartError, match="the engine failed to tokenize: 500: "):
            batchrunner.run({**job, "tokenize": "client"}, fresh=True)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("chat_template.jinja", "{% for %}", "the chat template cannot be compiled"),
    ],
)
def test_files_that_cannot_be_used(
    file: str, content: str | None, why: str, server: FakeSGLang, model: Path, tmp_path: Path
) -> None:
    """A model directory without a fast tokenizer or with a broken template leaves it to the server."""
    (model / file).unlink() if content is None else (model / file).write_text(content)
    job = job_of(tmp_path, server, rows=2, prompt={"user": "{{ text }}"})
    assert batchrunner.run(job).rows_ok == 2
    ((where, told),) = where_of(job)
    assert (where, why in str(told), "\n" in str(told)) == ("server", True, False)


def test_what_only_the_server_can_do_is_left_to_it(server: FakeSGLang, tmp_path: Path) -> None:
    """Rows with roles or parts that are the server's to read go to it as messages, beside those with ids."""
    chats = [
        messages(("user", "a")), messages(("tool", "b")), messages(("developer", "c"), ("user", "d")),
        [{"role": "user", "content": "e", "name": "n"}],
    ]  # fmt: skip
    write_rows(tmp_path / "input.parquet", 4, chat=chats)
    assert batchrunner.run(job_of(tmp_path, server, prompt={"messages": "chat"})).rows_ok == 4
    assert sorted(sent.path for sent in server.sent) == ["/generate", *["/v1/chat/completions"] * 3]


def test_an_answer_that_is_begun(server: FakeSGLang, model: Path, tmp_path: Path) -> None:
    """It is left to the server where a model goes on with it; else the row's last answer is left out."""
    write_rows(tmp_path / "input.parquet", 1, chat=[messages(("user", "a"), ("assistant", "It "))])
    job = job_of(tmp_path, server, prompt={"messages": "chat", "continue": True})
    batchrunner.run(job)
    assert where_of(job) == [("server", "only the server can put the beginning of an answer into the prompt")]
    server.forget()
    batchrunner.run({**job, "prompt": {"messages": "chat"}, "tokenize": "client"}, fresh=True)
    assert sent_text(model, server.sent[0].body) == f"{START}user\na{END}\n{START}assistant\n"


def test_rows_that_cannot_be_made_tokens_fail_alone(server: FakeSGLang, model: Path, tmp_path: Path) -> None:
    """A template's refusal, an unpaired surrogate and an over-long prompt are error rows of one line each."""
    (model / "chat_template.jinja").write_text(
        "{% if 'bad' in messages[0].content %}{{ raise_exception('not\\nthis') }}{% endif %}" + CHATML
    )
    texts = ["good", "bad", "surrogate", "é" * 1_000_000]
    write_rows(tmp_path / "input.parquet", 4, kind=texts)
    prompt = {"user": "{{ kind }}{% if kind == 'surrogate' %}{{ '\\ud800' }}{% endif %}"}
    job = job_of(tmp_path, server, prompt=prompt, limits={"max_failed_rows": 3})
    assert batchrunner.run(job).exit_code == 0
    errors = column_of(job, "error")
    assert errors[:2] == [None, "chat template: not this"]
    assert errors[2].startswith("the prompt cannot be tokenized: UnicodeEncodeError: 'utf-8' codec can't")
    assert "is longer than the model's context length (4096 tokens)" in errors[3]
    assert len(server.sent) == 1


def test_an_unpaired_surrogate_on_its_way_to_the_server(tmp_path: Path) -> None:
    """Where the server makes the tokens, a row that no JSON can hold fails alone too."""
    prompt = {"user": "{{ text }}{% if id == 1 %}{{ '\\ud800' }}{% endif %}"}
    with FakeSGLang() as server:
        job = job_of(tmp_path, server, rows=3, prompt=prompt, limits={"max_failed_rows": 1})
        assert batchrunner.run(job).exit_code == 0
    wrong = "the prompt cannot be sent: str is not valid UTF-8: surrogates not allowed"
    assert column_of(job, "error") == [None, wrong, None]


@pytest.mark.parametrize("cut", ["head", "tail", "middle"])
def test_truncate(cut: str, server: FakeSGLang, model: Path, tmp_path: Path) -> None:
    """A prompt that is too long is cut where the job says, never in the template, and fills what there is."""
    write_rows(tmp_path / "input.parquet", 1, long=["BEGIN " + "word " * 5000 + " END"])
    batchrunner.run(job_of(tmp_path, server, prompt={"user": "{{ long }}", "truncate": cut}))
    (body,) = [sent.body for sent in server.sent]
    assert 4096 - 1024 - 8 < len(body["input_ids"]) <= 4096 - 1024
    sent = sent_text(model, body)
    assert sent.startswith(f"{START}user\n")
    assert sent.endswith(f"{END}\n{START}assistant\n")
    assert ("BEGIN" in sent, " END" in sent) == (cut != "head", cut != "tail")


def test_truncate_token_ids(tmp_path: Path, server: FakeSGLang) -> None:
    """Prompts that are token ids are cut as they are; no tokenizer is needed for it."""
    many = [n % 300 for n in range(5000)]
    write_rows(tmp_path / "input.parquet", 1, ids=[many])
    server.arguments = {"tokenizer_path": "not/here"}
    batchrunner.run(job_of(tmp_path, server, prompt={"input_ids": "ids", "truncate": "head"}))
    assert [sent.body["input_ids"] for sent in server.sent] == [many[5000 - 3072 :]]


def test_truncate_needs_tokens_here(tmp_path: Path) -> None:
    """Truncation without a tokenizer is one clear line at the start, not rows that are sent uncut."""
    job = job_of(tmp_path, prompt={"text": "text", "truncate": "tail"})
    with pytest.raises(JobError, match="leave out `tokenize: server`"):
        batchrunner.run({**job, "tokenize": "server"})
    with pytest.raises(EngineStartError, match=r"^prompt\.truncate: .*the engine reports no tokenizer"):
        batchrunner.run(job)
