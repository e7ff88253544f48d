"""`batchrun serve --keys`: several owners of files and batches on one engine."""

import contextlib
import hashlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.conftest import batchrun, eventually
from tests.e2e.test_batch_files import CHAT
from tests.e2e.test_serve import ENDED, FAST, SLOW, Server, requests_of, serving
from tests.support.server_thread import PATIENCE_S

KEYS = {"anna": "sk-anna-0123456789", "ben": "sk-ben-0123456789", "root": "sk-root-0123456789"}


def write_keys(path: Path, **limits: Any) -> Path:
    """Write a file of keys; `limits` has further fields of an owner, by name."""
    owners: list[dict[str, Any]] = [
        {"name": "anna", "key": KEYS["anna"]},
        {"name": "ben", "sha256": hashlib.sha256(KEYS["ben"].encode()).hexdigest()},
        {"name": "root", "key": KEYS["root"], "admin": True},
    ]
    path.write_text(json.dumps([{**owner, **limits.get(owner["name"], {})} for owner in owners]))
    return path


class Client(openai.OpenAI):  # type: ignore[misc]
    """OpenAI's client with short forms."""

    def upload(self, content: bytes) -> str:
        """Upload a batch file; return its ID."""
        return str(self.files.create(file=("a.jsonl", content), purpose="batch").id)

    def begin(self, content: bytes, window: Any = "24h") -> Batch:
        """Create a batch."""
        file = self.upload(content)
        return self.batches.create(input_file_id=file, endpoint=CHAT, completion_window=window)

    def ended(self, batch: Batch) -> Batch:
        """Wait until a batch has ended."""
        eventually(lambda: self.batches.retrieve(batch.id).status in ENDED, every_s=0.05)
        return self.batches.retrieve(batch.id)


def client_of(server: Server, name: str, key: str = "") -> Client:
    """Return the client of an owner."""
    client = Client(base_url=server.url, api_key=key or KEYS[name], max_retries=0, timeout=PATIENCE_S)
    server.clients.append(client)
    return client


def test_owners_see_only_their_own(tmp_path: Path) -> None:
    """Other owners' files and batches do not exist, also after a kill; an admin sees all."""
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--keys", keys, *FAST) as server:
        anna = client_of(server, "anna")
        batch = anna.ended(anna.begin(requests_of(3)))
        server.kill()
        server.start()
        anna, ben, root = (client_of(server, name) for name in KEYS)
        files = [batch.input_file_id, batch.output_file_id or ""]
        calls: list[Callable[[openai.OpenAI], object]] = [
            lambda client: client.batches.retrieve(batch.id),
            lambda client: client.batches.cancel(batch.id),
            lambda client: client.batches.list(after=batch.id),
            lambda client: client.files.list(after=files[0]),
            lambda client: client.batches.create(
                input_file_id=files[0], endpoint=CHAT, completion_window="24h"
            ),
            *(lambda client, file=file: client.files.retrieve(file) for file in files),
            *(lambda client, file=file: client.files.content(file) for file in files),
            *(lambda client, file=file: client.files.delete(file) for file in files),
        ]
        for call in calls:
            with pytest.raises(openai.APIStatusError) as refused:
                call(ben)
            assert refused.value.status_code == (400 if "Invalid" in refused.value.message else 404)
        assert [*ben.files.list()] == [*ben.batches.list()] == []
        assert {file.id for file in anna.files.list()} == {*files}
        assert "owner" not in anna.batches.retrieve(batch.id).to_dict()
        assert root.batches.retrieve(batch.id).to_dict()["owner"] == "anna"
        assert {file.id for file in root.files.list()} == {*files}
        assert root.files.delete(files[0]).deleted
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "anna", "sk-anna").files.list()
        for client, status in ((anna, 403), (root, 200)):
            url, headers = server.url[:-2] + "metrics", client.auth_headers
            assert httpx.get(url, headers=headers, trust_env=False).status_code == status


def test_keys_with_spaces_around(tmp_path: Path) -> None:
    """A line break or spaces around a key or its digest in the file do not count, as in a header."""
    keys, digest = tmp_path / "keys.yaml", hashlib.sha256(KEYS["ben"].encode()).hexdigest()
    keys.write_text(
        f"- name: anna\n  key: |\n    {KEYS['anna']}\n"
        f"- {{name: ben, sha256: ' {digest} '}}\n"
        f"- {{name: root, key: ' {KEYS['root']}'}}\n"
    )
    with serving(tmp_path / "state", "--keys", keys, *FAST) as server:
        for name in KEYS:
            assert [*client_of(server, name).files.list()] == []
    with serving(tmp_path / "state", *FAST, key="sk-only\n") as server:
        assert [*client_of(server, "", "sk-only").files.list()] == []
        assert httpx.get(f"{server.url}/files", trust_env=False).status_code == 401


def test_limits_of_batches_and_requests(tmp_path: Path) -> None:
    """What exceeds a limit is refused as OpenAI refuses it, and the owner's other batches go on."""
    keys = write_keys(tmp_path / "keys.yaml", anna={"max_batches": 2}, ben={"max_queued_requests": 30})
    with serving(tmp_path / "state", "--keys", keys, *SLOW) as server:
        anna, ben = client_of(server, "anna"), client_of(server, "ben")
        first = anna.begin(requests_of(200))
        anna.begin(requests_of(200))
        with pytest.raises(openai.RateLimitError, match="2 unfinished batches, and your limit is 2") as limit:
            anna.begin(requests_of(1))
        assert (limit.value.code, limit.value.type) == ("rate_limit_exceeded", "requests")
        assert limit.value.response.headers["retry-after"] == "60"
        anna.batches.cancel(first.id)
        anna.ended(first)
        anna.batches.cancel(anna.begin(requests_of(1)).id)

        ben.begin(requests_of(20))
        failed = ben.ended(ben.begin(requests_of(31)))
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert failed.errors.data[0].code == "rate_limit_exceeded"
        assert "your limit is 30" in (failed.errors.data[0].message or "")


def test_tokens_of_a_day(tmp_path: Path) -> None:
    """Batches pause when the tokens are used up, also after a kill; others go on; new batches are refused."""
    limit = {"max_tokens_per_day": 300}
    keys = write_keys(tmp_path / "keys.yaml", anna=limit)
    with serving(tmp_path / "state", "--keys", keys, *SLOW) as server:
        anna, ben = client_of(server, "anna"), client_of(server, "ben")
        large = anna.begin(requests_of(60, max_tokens=20))

        def is_refused() -> bool:
            with contextlib.suppress(openai.RateLimitError):
                anna.begin(requests_of(1, max_tokens=5))
                return False
            return True

        eventually(is_refused, every_s=1.0)
        with pytest.raises(openai.RateLimitError) as refused:
            anna.begin(requests_of(1))
        assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
        assert 0 < int(refused.value.response.headers["retry-after"]) <= 86_400
        assert ben.ended(ben.begin(requests_of(30, max_tokens=20))).status == "completed"
        assert anna.batches.retrieve(large.id).status == "in_progress"
        assert server.kill(signal.SIGTERM) == 0
        used = json.loads((server.directory / "usage.json").read_text())["tokens"]
        assert used["anna"] >= limit["max_tokens_per_day"]
        server.start()
        anna = client_of(server, "anna")
        assert is_refused()
        write_keys(keys)
        server.process.send_signal(signal.SIGHUP)
        assert {anna.ended(batch).status for batch in anna.batches.list()} == {"completed"}


@contextlib.contextmanager
def inherited(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    """Let processes that are started in the block inherit how this process treats a signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["in a terminal", "nohup"])
def test_keys_are_read_again(tmp_path: Path, handler: signal.Handlers) -> None:
    """SIGHUP takes new keys without a pause; a file that is wrong changes nothing, and is one line."""
    keys = write_keys(tmp_path / "keys.yaml")
    with inherited(signal.SIGHUP, handler), serving(tmp_path / "state", "--keys", keys, *FAST) as server:
        anna = client_of(server, "anna")
        file = anna.upload(requests_of(1))
        secret = "sk-a-new-secret"
        for broken in (f"- {secret}: {secret}", f"- name: {secret} x\n  key: {secret}", f"{{{secret}", ""):
            lines = len(server.log.read_text().splitlines())
            keys.write_text(broken)
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda lines=lines: len(server.log.read_text().splitlines()) > lines)  # type: ignore[misc]
            assert "the old keys stay in force" in server.log.read_text().splitlines()[-1]
            assert len(server.log.read_text().splitlines()) == lines + 1
            assert anna.files.retrieve(file).id == file
        keys.write_text(json.dumps([{"name": "anna", "key": secret}]))
        server.process.send_signal(signal.SIGHUP)
        renewed = client_of(server, "anna", secret)

        def has_changed() -> bool:
            with contextlib.suppress(openai.AuthenticationError):
                return bool(renewed.files.retrieve(file).id == file)
            return False

        eventually(has_changed)
        with pytest.raises(openai.AuthenticationError):
            anna.files.list()
        paths = [server.log, *(path for path in server.directory.rglob("*") if path.is_file())]
        assert not [path for path in paths if secret in path.read_text() or KEYS["anna"] in path.read_text()]


def test_owners_who_come_later(tmp_path: Path) -> None:
    """Each of ten owners may run two batches at once, also where the server began with one owner."""
    keys = tmp_path / "keys.yaml"
    owners = [{"name": f"owner-{number}", "key": f"sk-{number}", "admin": not number} for number in range(10)]
    keys.write_text(json.dumps(owners[:1]))
    with serving(tmp_path / "state", "--keys", keys, *SLOW) as server:
        keys.write_text(json.dumps(owners))
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "10 owners" in server.log.read_text())
        client = client_of(server, "", "sk-1")
        batches = [client.begin(requests_of(200)) for _ in range(4)]
        eventually(lambda: {client.batches.retrieve(each.id).status for each in batches} == {"in_progress"})
        url, headers = f"{server.url}/activity", client.auth_headers

        seen = list[tuple[int, int]]()  # batches that run, and batches that wait

        def two_run_and_two_wait() -> bool:
            activity = httpx.get(url, headers=headers, trust_env=False).json()
            seen.append((len(activity["running"]), activity["waiting"]))
            return seen[-1] == (2, 2)

        eventually(two_run_and_two_wait)
        assert max(running for running, _ in seen) == 2
        for batch in batches:
            client.batches.cancel(batch.id)


def test_requests_that_are_no_http(tmp_path: Path) -> None:
    """The client gets an error, and the log nothing: a key with a line break too many is not in it."""
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--keys", keys, *FAST) as server:
        address = httpx.URL(server.url)
        for line in (f"Authorization: Bearer {KEYS['anna']}\r", f"X: {KEYS['anna'] * 1000}", "no header"):
            with socket.create_connection((address.host, address.port), PATIENCE_S) as connection:
                connection.sendall(f"GET /v1/files HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
                assert b" 400 " in connection.makefile("rb").readline()
        assert [*client_of(server, "anna").files.list()] == []
        assert server.log.read_text().splitlines() == []


WRONG_FILES = {
    "- {name: a, key: sk-x}\n- {name: a, key: sk-y}": "two entries have equal names",
    "- {name: a, key: sk-x}\n- {name: b, key: sk-x}": "two entries have equal keys",
    "- {name: a, key: ' '}": "entry 1: Value error, `key` is empty",
    "- {name: a}": "entry 1: Value error, give either `key` or `sha256`",
    "- {name: a, key: sk-x, share: 0}": "entry 1, share: Input should be greater than 0",
    "- {name: a, key: sk-x, sk-secret: 1}": "entry 1: Extra inputs are not permitted",
    "- {name: a b, key: sk-x}": "entry 1, name: String should match pattern",
    "sk-secret: [": "is not valid YAML (line 1)",
    "[]": "has no entry",
}


def test_wrong_files_of_keys(tmp_path: Path) -> None:
    """Each is one line that repeats nothing of the file, and exit code 2."""
    keys = tmp_path / "keys.yaml"
    serve = ("serve", "--engine", "simulated", "--dir", tmp_path / "state", "--port", 0, "--keys", keys)
    refused = batchrun(*serve)
    assert (refused.exit_code, "No such file" in refused.stderr) == (2, True)
    for content, problem in WRONG_FILES.items():
        keys.write_text(content)
        refused = batchrun(*serve)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr
        assert "sk-" not in refused.stderr


def test_an_owner_with_many_batches(tmp_path: Path) -> None:
    """The batch of one owner does not wait for the batches of another; an owner's oldest batch goes first."""
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--keys", keys, *SLOW) as server:
        anna, ben = client_of(server, "anna"), client_of(server, "ben")
        many = [anna.begin(requests_of(100, max_tokens=20)) for _ in range(12)]
        one = ben.ended(ben.begin(requests_of(20, max_tokens=20)))
        assert one.status == "completed"
        counts = [anna.batches.retrieve(batch.id).request_counts for batch in many]
        done = [count.completed for count in counts if count is not None]
        assert done == sorted(done, reverse=True)
        assert done[-1] == 0
