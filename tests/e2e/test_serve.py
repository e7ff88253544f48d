"""`batchrun serve`: OpenAI's own client, unmodified, on a server of Files and Batches; and kills of it."""

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import openai
import pytest
from openai.types import Batch, BatchRequestCounts

from batchrunner.serve.state import FILES, State
from tests.conftest import ROOT, batchrun, eventually
from tests.e2e.test_batch_files import CHAT, request_of
from tests.e2e.test_refused_rows import WRONG as WRONG_ANSWERS
from tests.support.blocks import blocks_of
from tests.support.fake_sglang import FakeSGLang
from tests.support.real_gateway import RealGateway, two_workers
from tests.support.server_thread import PATIENCE_S

LIFE = ["validating", "in_progress", "finalizing", "completed"]
"""Statuses of a batch, in order."""
ENDED = {"completed", "failed", "expired", "cancelled"}


def requests_of(count: int, first: int = 0, **body: Any) -> bytes:
    """Return a batch file of chats, whose numbers begin with `first`."""
    numbers = range(first, first + count)
    return b"".join(json.dumps(request_of(number, **body)).encode() + b"\n" for number in numbers)


class Server:
    """The command in a process of its own, on a directory."""

    def __init__(self, directory: Path, *options: object, engine: str = "simulated", key: str = "") -> None:
        self.directory = directory
        self._command = [
            sys.executable, "-m", "batchrunner", "serve", "--engine", engine, "--dir", str(directory),
            "--port", "0", *map(str, options),
        ]  # fmt: skip
        self._key = key
        self.log = directory.with_suffix(".log")
        """What it writes to standard error."""

    def start(self) -> None:
        """Start it and wait until it serves."""
        # The tests' own folder in PYTHONPATH lets an engine that it launches start quickly.
        path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
        environ = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "BATCHRUN_API_KEY": self._key}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environ},
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.client = openai.OpenAI(
            base_url=self.url, api_key=self._key or "none", max_retries=0, timeout=PATIENCE_S
        )
        self.clients = [self.client]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal; return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for client in self.clients:
            client.close()
        return code

    def upload(self, content: bytes) -> str:
        """Upload a batch file; return its ID."""
        return str(self.client.files.create(file=("a.jsonl", content), purpose="batch").id)

    def begin(self, file: str, window: Any = "24h", endpoint: Any = CHAT) -> Batch:
        """Create a batch."""
        return self.client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window)

    def ended(self, batch: Batch) -> Batch:
        """Wait until a batch has ended."""
        eventually(lambda: self.client.batches.retrieve(batch.id).status in ENDED, every_s=0.05)
        return self.client.batches.retrieve(batch.id)

    def lines_of(self, file: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file."""
        return [json.loads(line) for line in self.client.files.content(file or "").text.splitlines()]


def number_of(line: dict[str, Any]) -> int:
    """Return the number of the request of a line."""
    return int(line["custom_id"].removeprefix("request-"))


@contextlib.contextmanager
def serving(*args: Any, **options: Any) -> Iterator[Server]:
    """Run a server, which is gone afterwards."""
    server = Server(*args, **options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def test_a_replica_that_fails_everything(tmp_path: Path) -> None:
    """No line of a batch fails that another replica answers, whatever the first one says."""
    with FakeSGLang() as wrong, FakeSGLang(delay_s=0.01) as right:
        engines = ("--engine", right.url, "--set", "limits.max_attempts=1")
        with serving(tmp_path / "d", *engines, engine=wrong.url) as server:
            for what in ("418", "500", "abort", "no body", "truncated JSON", "an error with 200"):
                wrong.script = lambda _, what=what: WRONG_ANSWERS[what]  # type: ignore[misc]
                batch = server.ended(server.begin(server.upload(requests_of(100))))
                assert batch.request_counts is not None
                counts = {"total": 100, "completed": 100, "failed": 0}
                assert (what, batch.request_counts.to_dict()) == (what, counts)
                assert wrong.sent
                wrong.forget(clients_stay=True)


@pytest.mark.gateway
@pytest.mark.usefixtures("quiet_fakes")
def test_an_engine_behind_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches outlive the gateway, and one for an endpoint that the gateway lacks is refused."""
    gateway = RealGateway("--policy", "consistent_hashing", "--disable-circuit-breaker")
    with two_workers(gateway, monkeypatch) as workers:
        base = tmp_path / "base.yaml"
        base.write_text(f"engine: {{kind: gateway, url: '{gateway.url}', route: gateway}}")
        with serving(tmp_path / "d", engine=str(base)) as server:
            file = server.upload(requests_of(60))
            with pytest.raises(openai.BadRequestError, match=r"supported are [^.]*/v1/responses\."):
                server.begin(file, endpoint="/v1/score")
            for worker in workers:
                worker.script = lambda _: "hold"
            batch = server.begin(file)
            eventually(lambda: all("question" in str(worker.prompts) for worker in workers))
            gateway.restart()
            for worker in workers:
                worker.script = lambda _: "answer"
                worker.ask_again()
            gateway.use(*(worker.url for worker in workers))
            batch = server.ended(batch)
            assert sorted(map(number_of, server.lines_of(batch.output_file_id))) == list(range(60))
    gateway.end()


@pytest.mark.parametrize("users", [False, True])
def test_several_engines_in_the_background(tmp_path: Path, *, users: bool) -> None:
    """Batches whose lines begin alike are done, also where users had all slots as they began."""
    messages = [[{"role": "system", "content": f"{number % 4} {'long beginning ' * 200}"},
                 {"role": "user", "content": f"question {number}"}] for number in range(40)]  # fmt: skip
    content = b"".join(
        json.dumps(request_of(number, messages=messages[number])).encode() + b"\n" for number in range(40)
    )
    with FakeSGLang() as one, FakeSGLang() as other:
        for engine in (one, other):
            engine.others = 2 * engine.max_running if users else 0
        with serving(tmp_path / "d", "--background", "--engine", other.url, engine=one.url) as server:
            batches = [server.begin(server.upload(content)) for _ in range(2)]
            polled = one.polled
            eventually(lambda: one.polled > polled + 2)
            one.others = other.others = 0
            assert {server.ended(batch).status for batch in batches} == {"completed"}
        assert len(one.sent) + len(other.sent) >= 80


def test_in_the_background(tmp_path: Path) -> None:
    """With --background the users of the server go first: rows have the lowest priority."""
    arguments = {"enable_priority_scheduling": True, "default_priority_value": 0}
    with (
        FakeSGLang(arguments=arguments) as engine,
        serving(tmp_path / "d", "--background", engine=engine.url) as server,
    ):
        batch = server.ended(server.begin(server.upload(requests_of(5))))
        assert batch.status == "completed"
        assert {sent.body["priority"] for sent in engine.sent} == {-(2**63)}
        engine.script = lambda _: "hold"
        batch = server.begin(server.upload(requests_of(5)))
        engine.wait_for(6)
        server.client.batches.cancel(batch.id)
        assert server.ended(batch).status == "cancelled"


FAST, SLOW = ("--set", "engine.step_s=0"), ("--set", "engine.step_s=0.02", "--set", "engine.max_running=8")


def test_a_batch_from_upload_to_download(tmp_path: Path) -> None:
    """What `batchrun batch` writes for a file is what the API gives for it, byte for byte."""
    content = requests_of(30) + b"no request\n" + requests_of(1, 30, max_tokens=-5)
    requests = tmp_path / "requests.jsonl"
    requests.write_bytes(content)
    by_command = [tmp_path / "out.jsonl", tmp_path / "errors.jsonl"]
    done = batchrun(
        "batch", requests, "-o", by_command[0], "--errors", by_command[1], "--engine", "simulated", *FAST
    )
    assert done.exit_code == 0, done.stderr
    with serving(tmp_path / "state", *FAST) as server:
        client = server.client
        assert client.models.retrieve(next(iter(client.models.list())).id).id == "simulated"
        file = client.files.create(file=("../../odd/\u00e4.jsonl", content), purpose="batch")
        assert (file.bytes, file.status) == (len(content), "processed")
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "me"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"for": "me"})
        batch = server.ended(batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 32, "completed": 30, "failed": 2}
        times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
        assert times == sorted(times, key=int)
        for made, expected in zip((batch.output_file_id, batch.error_file_id), by_command, strict=True):
            assert made is not None
            told = client.files.content(made).text.replace(file.id, requests.name)
            assert told == expected.read_text()
        spent = [line["response"]["body"]["usage"] for line in server.lines_of(batch.output_file_id)]
        assert batch.usage is not None
        assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in spent)
        assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in spent)
        found = client.files.list(purpose="batch_output")
        assert {each.id for each in found} == {batch.output_file_id, batch.error_file_id}
        assert client.files.delete(file.id).deleted
        second = server.ended(server.begin(server.upload(requests_of(1))))
        assert second.error_file_id is None
        assert [each.id for each in client.batches.list(limit=1)] == [second.id, batch.id]
        assert client.batches.list(limit=1).has_more
        eventually(lambda: len([*(tmp_path / "state" / "batches").iterdir()]) == 2)  # the runs are gone
        told = server.client.get("/../metrics", cast_to=str)
        assert 'batchrunner_serve_batches{owner="",status="completed"} 2.0' in told
        assert server.kill(signal.SIGTERM) == 0
        server.start()


WRONG: dict[str, tuple[int, str | None, Callable[[openai.OpenAI, str], object]]] = {
    "no content": (404, None, lambda client, _: client.files.content("..%2F..%2Fbatches")),
    "no batch": (404, None, lambda client, _: client.batches.retrieve("batch_none")),
    "no chat": (404, None, lambda client, _: client.chat.completions.create(model="m", messages=[])),
    "purpose": (400, "invalid_value", lambda client, _: client.files.create(file=b"a", purpose="vision")),
    "no form": (400, None, lambda client, _: client.post("/files", cast_to=object, body={"a": "b"})),
    "no input": (400, "invalid_value", lambda client, _: _create(client, "file-none")),
    "results as input": (400, "invalid_value", lambda client, file: _create(client, f"{file}-output")),
    "endpoint": (400, "invalid_value", lambda client, file: _create(client, file, endpoint="/v1/images")),
    "window": (400, "invalid_value", lambda client, file: _create(client, file, completion_window="soon")),
    "endless": (400, "invalid_value", lambda c, file: _create(c, file, completion_window="9" * 400 + "d")),
    "metadata": (400, "invalid_value", lambda client, file: _create(client, file, metadata={"a": 1})),
    "unknown": (400, "unknown_parameter", lambda client, file: _create(client, file, extra_body={"a": 1})),
    "missing": (400, "missing_required_parameter", lambda client, _: client.post(
        "/batches", cast_to=object, body={"endpoint": CHAT}
    )),
    "limit": (400, "invalid_value", lambda client, _: client.batches.list(limit=10_001)),
    "lifetime": (400, "invalid_value", lambda client, _: client.files.create(
        file=b"a", purpose="batch", expires_after={"anchor": "created_at", "seconds": 60}
    )),
    "half a lifetime": (400, "missing_required_parameter", lambda client, _: client.files.create(
        file=b"a", purpose="batch", expires_after=cast("Any", {"anchor": "created_at"})
    )),
    "after": (400, "invalid_value", lambda client, _: client.files.list(after="file-none")),
}  # fmt: skip


def _create(client: openai.OpenAI, file: str, **changes: Any) -> Any:
    return client.batches.create(
        **{"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **changes}
    )


def test_calls_that_are_wrong(tmp_path: Path) -> None:
    """Each has the status and the error object of OpenAI's API, and changes nothing."""
    with serving(tmp_path / "state", "--max-files", 6, "--max-file-mb", 1, *FAST) as server:
        file = server.upload(requests_of(1))
        for name, (status, code, call) in WRONG.items():
            with pytest.raises(openai.APIStatusError) as caught:
                call(server.client, file)
            assert (name, caught.value.status_code, caught.value.code) == (name, status, code)
            assert isinstance(caught.value.body, dict)
            assert caught.value.body.keys() == {"message", "type", "param", "code"}
        encoding = {"Content-Encoding": "gzip"}
        answer = httpx.post(f"{server.url}/batches", content=b"{}", headers=encoding, trust_env=False)
        assert (answer.status_code, "Content-Encoding" in answer.text) == (400, True)
        batch = server.ended(server.begin(file))
        with pytest.raises(openai.ConflictError, match="status 'completed'"):
            server.client.batches.cancel(batch.id)
        with pytest.raises(openai.APIStatusError, match="larger than") as large:
            server.upload(b"a" * 1_000_001)
        assert large.value.status_code == 413
        for _ in range(4):
            server.upload(b"a" * 1_000_000)
        with pytest.raises(openai.BadRequestError, match="delete some"):
            server.upload(b"a")
        assert len([*server.client.files.list()]) == 6
        assert len([*(server.directory / "files").iterdir()]) == 12


def test_batches_that_fail(tmp_path: Path) -> None:
    """A file that is no batch file, or one for another endpoint, is taken, and its batch has the reasons."""
    with serving(tmp_path / "state", *FAST) as server:
        unnamed = (
            requests_of(3, url="/v1/completions")
            .replace(b'"request-1"', b"7")
            .replace(b'"custom_id": "request-2", ', b"")
        )
        for content, errors in (
            (b"\x00\xff\n" * 3, [("invalid_file", 1)]),
            (b"", [("invalid_file", None)]),
            (b"PK\x03\x04", [("invalid_file", None)]),
            (gzip.compress(requests_of(3))[:-20], [("invalid_file", None)]),
            (gzip.compress(requests_of(2)), [("invalid_url", 1), ("invalid_url", 2)]),
            (b"\n \n" + requests_of(1), [("invalid_url", 3)]),
            (requests_of(2) + requests_of(2, 2).replace(CHAT.encode(), b"/v1/audio/transcriptions"),
             [("invalid_url", number) for number in (1, 2, 3, 4)]),
            (requests_of(1, url="/v1/embeddings") + requests_of(2, 1, url="/v1/completions"),
             [("invalid_url", 1)]),
            (requests_of(1) + requests_of(2, 1, url="/v1/completions") + requests_of(1, 3, url="/v1/other"),
             [("invalid_url", 1), ("invalid_url", 4)]),
            (requests_of(2, url="/v1/completions") + requests_of(2, url="/v1/completions"),
             [("duplicate_custom_id", 3), ("duplicate_custom_id", 4)]),
            (unnamed, [("missing_required_parameter", 2), ("missing_required_parameter", 3)]),
        ):  # fmt: skip
            batch = server.ended(server.begin(server.upload(content), endpoint="/v1/completions"))
            assert (batch.status, batch.failed_at is None) == ("failed", False)
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert str(tmp_path) not in batch.errors.to_json()
            assert [(error.code, error.line) for error in batch.errors.data] == errors


@pytest.mark.parametrize("early", ["cancelled", "expired"])
def test_a_batch_ends_early(tmp_path: Path, early: str) -> None:
    """What is done is in the output, and each other line in the errors, also after a kill."""
    with serving(tmp_path / "state", *SLOW) as server:
        file = server.upload(gzip.compress(requests_of(400, max_tokens=10)))
        batch = server.begin(file, window="4s" if early == "expired" else "24h")
        with pytest.raises(openai.ConflictError):
            server.client.files.delete(file)

        def some_are_done() -> bool:
            last = server.client.batches.retrieve(batch.id)
            counts = last.request_counts
            assert counts is not None
            return counts.completed > 60 or last.status in ENDED  # those of a second are in no journal

        eventually(some_are_done)
        if early == "cancelled":
            assert server.client.batches.cancel(batch.id).status == "cancelling"
            server.kill()
            server.start()
        batch = server.ended(batch)
        assert batch.status == early
        assert getattr(batch, f"{early}_at") is not None
        done, left = server.lines_of(batch.output_file_id), server.lines_of(batch.error_file_id)
        assert done
        assert sorted(map(number_of, done + left)) == [*range(400)]
        assert {line["error"]["code"] for line in left} == {f"batch_{early}"}
        assert {line["response"] for line in left} == {None}


def test_a_cancellation_that_cannot_be_written(tmp_path: Path) -> None:
    """The call fails, as on a full disk, and the batch goes on; so it is not cancelled later either."""
    with serving(tmp_path / "state", *SLOW) as server:
        batch = server.begin(server.upload(requests_of(100, max_tokens=10)))
        eventually(lambda: server.client.batches.retrieve(batch.id).status == "in_progress")
        record, aside = tmp_path / "state" / "batches" / f"{batch.id}.json", tmp_path / "aside"
        record.rename(aside)
        record.mkdir()  # no file can be written here
        with pytest.raises(openai.InternalServerError):
            server.client.batches.cancel(batch.id)
        record.rmdir()
        aside.rename(record)
        batch = server.ended(batch)
        assert (batch.status, batch.cancelling_at) == ("completed", None)
        assert [*map(number_of, server.lines_of(batch.output_file_id))] == [*range(100)]


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    """A call that must write gets an error that says so, without a path, and changes nothing."""
    directory, aside = tmp_path / "state", tmp_path / "aside"
    with serving(directory, *FAST) as server:
        file = server.upload(requests_of(1))
        calls: dict[str, Callable[[], object]] = {
            "files": lambda: server.upload(requests_of(1)),
            "batches": lambda: server.begin(file),
        }
        for kind, call in calls.items():
            (directory / kind).rename(aside)
            (directory / kind).touch()  # no file can be written below a file
            with pytest.raises(openai.InternalServerError, match="cannot use its disk") as refused:
                call()
            (directory / kind).unlink()
            aside.rename(directory / kind)
            assert (refused.value.status_code, refused.value.code) == (507, "storage_error")
            assert refused.value.type == "server_error"
            assert str(directory) not in refused.value.message
        assert [each.id for each in server.client.files.list()] == [file]
        assert [*server.client.batches.list()] == []
        assert server.ended(server.begin(file)).status == "completed"


def test_files_are_listed_by_age(tmp_path: Path) -> None:
    """Results are younger than a file that was uploaded after their batch began, also after a restart."""
    with serving(tmp_path / "state", *SLOW) as server:
        first = server.upload(requests_of(1, max_tokens=10))
        batch = server.begin(first, window=cast("Any", 3600))
        assert batch.completion_window == "3600"
        second = server.upload(requests_of(1))
        by_age = [first, second, server.ended(batch).output_file_id]
        for _ in range(2):
            assert [file.id for file in server.client.files.list(order="asc")] == by_age
            server.kill()
            server.start()


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_files_are_deleted_page_by_page(tmp_path: Path, order: Literal["asc", "desc"]) -> None:
    """A client deletes each file as it reads a list, so it goes on after a file that is no more."""
    with serving(tmp_path / "state", *FAST) as server:
        names = [server.upload(requests_of(1)) for _ in range(5)]
        deleted = []
        for file in server.client.files.list(limit=2, order=order):
            server.client.files.delete(file.id)
            deleted.append(file.id)
        assert deleted == (names if order == "asc" else names[::-1])
        with pytest.raises(openai.BadRequestError, match="no such ID"):
            server.client.files.list(after="file-none")


def test_a_file_is_deleted_as_a_batch_begins(tmp_path: Path) -> None:
    """One of the two calls is refused: no batch begins without its file."""
    outcomes = []
    with serving(tmp_path / "state", *FAST) as server, ThreadPoolExecutor(2) as both:
        for _ in range(20):
            file = server.upload(requests_of(2))
            creating = both.submit(_create, server.client, file)
            deleting = both.submit(server.client.files.delete, file)
            refused = deleting.exception() or creating.exception()
            assert isinstance(refused, openai.ConflictError | openai.BadRequestError)
            outcomes.append(creating.exception() is None)
            assert outcomes[-1] == (deleting.exception() is not None)
        batches = [server.ended(batch) for batch in server.client.batches.list(limit=100)]
    assert [batch.status for batch in batches] == ["completed"] * sum(outcomes)


def test_what_is_said_is_durable(tmp_path: Path) -> None:
    """Whatever a client reads of a batch is on the disk already, at each step of its life."""
    with serving(tmp_path / "state", *FAST) as server:
        file = server.upload(requests_of(2))
        for _ in range(10):
            batch = server.begin(file)
            record = tmp_path / "state" / "batches" / f"{batch.id}.json"
            while batch.status not in ENDED:
                batch = server.client.batches.retrieve(batch.id)
                stored = json.loads(record.read_text())
                assert LIFE.index(stored["status"]) >= LIFE.index(batch.status)
                assert batch.output_file_id in {None, stored["output_file_id"]}
        server.client.files.delete(file)
        server.kill()
        server.start()
        assert {each.status for each in server.client.batches.list()} == {"completed"}
        assert file not in {each.id for each in server.client.files.list()}


def test_files_expire(tmp_path: Path) -> None:
    """`expires_after` of an upload and `output_expires_after` of a batch: the files are deleted in time."""
    lifetime: Any = {"anchor": "created_at", "seconds": "3600"}  # as a form has it
    with serving(tmp_path / "state", *FAST) as server:
        content = ("a.jsonl", requests_of(2))
        file = server.client.files.create(file=content, purpose="batch", expires_after=lifetime)
        kept = server.upload(requests_of(1))
        batch = server.ended(_create(server.client, file.id, output_expires_after=lifetime))
        output = server.client.files.retrieve(batch.output_file_id or "")
        for made in (file, output):
            assert made.expires_at == made.created_at + 3600
        server.kill()
        for made in (file, output):  # an hour later
            record = tmp_path / "state" / "files" / f"{made.id}.json"
            record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": 1}))
        server.start()
        assert [each.id for each in server.client.files.list()] == [kept]


def test_forms_of_uploads(tmp_path: Path) -> None:
    """A body may be compressed or chunked; the fields of a lifetime have brackets or dots."""
    content = requests_of(1)
    names = ("expires_after[{}]", "expires_after.{}")
    with serving(tmp_path / "state", *FAST) as server:
        for name in names:
            data = {"purpose": "batch", name.format("anchor"): "created_at", name.format("seconds"): "3600"}
            form = httpx.Request("POST", f"{server.url}/files", files={"file": ("a", content)}, data=data)
            body, headers = form.read(), {"Content-Type": form.headers["Content-Type"]}
            zipped = {**headers, "Content-Encoding": "gzip"}
            chunks = (body[at : at + 100] for at in range(0, len(body), 100))
            for sent, sent_headers in ((body, headers), (gzip.compress(body), zipped), (chunks, headers)):
                reply = httpx.post(f"{server.url}/files", content=sent, headers=sent_headers, trust_env=False)
                assert reply.status_code == 200, reply.text
                file = reply.json()
                assert file["expires_at"] == file["created_at"] + 3600
                assert server.client.files.content(file["id"]).content == content


def test_calls_by_head(tmp_path: Path) -> None:
    """What GET answers, HEAD answers without the body, also for a file's content; nothing else changes."""
    with serving(tmp_path / "state", *FAST) as server:
        file, address = server.upload(requests_of(1)), server.url.removesuffix("v1")
        for path in ("", "health", "ready", "metrics", "v1/files", f"v1/files/{file}/content"):
            reply = httpx.head(address + path, trust_env=False)
            assert (path, reply.status_code, reply.content) == (path, 200, b"")
            assert int(reply.headers["Content-Length"]) > 0
        assert httpx.head(f"{address}v1/batches/none", trust_env=False).status_code == 404


def test_files_without_a_lifetime_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a second begins while it is looked which have expired."""
    state = State(tmp_path)
    state.records[FILES]["file-a"] = {"expires_at": None}
    monkeypatch.setattr("batchrunner.serve.state.now", itertools.count().__next__)
    asyncio.run(state.delete_expired())
    assert state.records[FILES]


def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    """The server does not start, and deletes nothing."""
    with serving(tmp_path / "state", *FAST) as server:
        content = tmp_path / "state" / "files" / server.upload(requests_of(1))
    record = content.with_name(f"{content.name}.json")
    record.write_text("{")
    refused = batchrun("serve", "--engine", "simulated", "--dir", tmp_path / "state", "--port", 0)
    assert (refused.exit_code, refused.stderr.count(f"{record}: cannot be used")) == (2, 1)
    assert content.read_bytes() == requests_of(1)


def test_a_port_in_use(tmp_path: Path) -> None:
    """That is said before the engine is opened."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = ("--engine", "http://127.0.0.1:9")  # nothing is there
        refused = batchrun("serve", *engine, "--dir", tmp_path / "state", "--port", port)
    assert (refused.exit_code, refused.stderr.count(f"--port {port}")) == (2, 1), refused.stderr


def test_a_small_batch_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    """Batches at once have equal parts of the engine."""
    with serving(tmp_path / "state", *SLOW) as server:
        large = server.begin(server.upload(requests_of(2000, max_tokens=10)))
        small = server.begin(server.upload(requests_of(20, max_tokens=10)))
        assert server.ended(small).status == "completed"
        assert server.client.batches.retrieve(large.id).status == "in_progress"
        server.client.batches.cancel(large.id)


def test_kills_lose_nothing(tmp_path: Path) -> None:
    """Whatever is uploaded or accepted is there after a kill; each line is answered, and once."""
    server, random_s = Server(tmp_path / "state", *SLOW), random.Random(7)
    for name in ("mine.txt", "files/mine.json", "files/mine", "batches/mine/mine.txt"):
        (tmp_path / "state" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "state" / name).write_text("{}")
    content, files, batches = requests_of(40, max_tokens=10), list[str](), list[Batch]()
    for _ in range(4):
        server.start()
        client = server.client

        def call(client: openai.OpenAI = client) -> None:
            with contextlib.suppress(openai.APIError):
                while True:
                    files.append(client.files.create(file=("a", content), purpose="batch").id)
                    batches.append(_create(client, files[-1]))

        calling = threading.Thread(target=call)
        calling.start()
        time.sleep(random_s.uniform(0.1, 1.0))
        server.kill()
        calling.join()
    with serving(tmp_path / "state", *SLOW) as last:
        assert batches
        assert not [*(tmp_path / "state" / "files").glob(".*")]
        assert len([*(tmp_path / "state").rglob("mine*")]) == 5  # what others put there stays
        for file in files:
            assert last.client.files.content(file).content == content
        for batch in batches[-4:]:
            done = last.ended(batch)
            assert done.status == "completed"
            assert [*map(number_of, last.lines_of(done.output_file_id))] == [*range(40)]


def test_who_may_call(tmp_path: Path) -> None:
    """Without a key only programs on this machine, and no page but the server's; else who has the key."""
    refused = batchrun("serve", "--engine", "simulated", "--dir", tmp_path, "--host", "0.0.0.0")
    assert (refused.exit_code, refused.stderr.count("BATCHRUN_API_KEY")) == (2, 1)
    refused = batchrun("serve", "--engine", "simulated", "--dir", "s3://bucket/state")
    assert (refused.exit_code, refused.stderr.count("--dir s3:/bucket/state: is a URI")) == (2, 1)

    def status(server: Server, path: str, **headers: str) -> int:
        url = server.url.removesuffix("/v1") + path
        return httpx.get(url, headers=headers, trust_env=False).status_code

    with serving(tmp_path / "one", *FAST) as server:
        assert status(server, "/v1/files") == 200
        own = server.url.removesuffix("/v1")
        assert status(server, "/v1/files", Origin=own) == 200  # the server's own page
        for origin in ("https://evil.example", "null", "", own + "0", own.replace("http:", "https:")):
            assert (origin, status(server, "/v1/files", Origin=origin)) == (origin, 403)
        rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert status(server, "/v1/files", **rebound) == 403
        for host in ("evil.example", "localhost:99999", "localhost:port", "a b", ""):
            assert (host, status(server, "/v1/files", Host=host)) == (host, 403)
    with serving(tmp_path / "two", *FAST, key="secret-key") as server:
        assert [*server.client.files.list()] == []
        assert status(server, "/health") == status(server, "/ready") == 200
        for path in ("/v1/files", "/metrics", "/v1/batches/x", "/v1/activity"):
            assert status(server, path) == 401
            for wrong in ("Bearer wrong", "Bearer", "Basic secret-key", "secret-key"):
                assert status(server, path, Authorization=wrong) == 401
        assert status(server, "/v1/files", Authorization="bearer secret-key") == 200
    with serving(tmp_path / "three", "--host", "::1", *FAST) as server:
        assert [*server.client.files.list()] == []


@pytest.mark.parametrize("early", ["cancelled", "expired"])
def test_the_engine_comes_later_and_changes(tmp_path: Path, early: str) -> None:
    """An engine that is not up yet is waited for; a batch waits for its own model, until it ends early.

    Meanwhile, the batch has the counts of requests that it had before the restart.
    """

    def counts_of(batch: Batch) -> BatchRequestCounts:
        counts = served.client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert counts.total == 40
        return counts

    with FakeSGLang() as first:
        url, port = first.url, int(first.url.rpartition(":")[2])
    served = Server(tmp_path / "state", engine=url)
    starting = threading.Thread(target=served.start)
    starting.start()
    time.sleep(1)
    with FakeSGLang(lambda sent: "answer" if engine.requests < 20 else "hold", port=port) as engine:
        starting.join()
        window = "20s" if early == "expired" else "24h"
        batch = served.begin(served.upload(requests_of(40)), window=window)
        engine.wait_for(20)
        eventually(lambda: counts_of(batch).completed > 10)
        done = counts_of(batch)
        served.kill()
    with FakeSGLang(model="another/model", port=port):
        served.start()
        assert served.client.models.list().data[0].id == "another/model"
        assert counts_of(batch).completed >= done.completed
        if early == "cancelled":
            assert served.client.batches.cancel(batch.id).status == "cancelling"
        batch = served.ended(batch)
        assert (batch.status, batch.model) == (early, "fake/model")
        files = [file for file in (batch.output_file_id, batch.error_file_id) if file]
        assert sorted(number_of(line) for file in files for line in served.lines_of(file)) == [*range(40)]
        served.kill()


def test_the_engine_has_another_model_for_a_while(tmp_path: Path) -> None:
    """Batches go on when their model is back; meanwhile they can be cancelled."""
    with FakeSGLang() as first:
        url, port = first.url, int(first.url.rpartition(":")[2])
        served = Server(tmp_path / "state", engine=url)
        served.start()
    with FakeSGLang(model="another/model", port=port) as another:
        batch = served.begin(served.upload(requests_of(4)))
        time.sleep(3)  # each second it is asked for its model
        unwanted = served.begin(served.upload(requests_of(4)))
        served.client.batches.cancel(unwanted.id)
        assert served.ended(unwanted).status == "cancelled"
        assert not another.requests
    with FakeSGLang(port=port):
        assert served.ended(batch).status == "completed"
        served.kill()


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/serve.md: its program, with the address of the server."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs" / "how-to" / "serve.md")
    (program,) = (block.text for block in blocks if block.language == "python")
    with serving(tmp_path / "state", *FAST) as server:
        exec(program.replace("http://localhost:8000/v1", server.url), {})
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 100
