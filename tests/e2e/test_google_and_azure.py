"""Runs on Google Cloud Storage and Azure: what differs from S3 is in the stand-ins."""

import base64
import hashlib
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

import pytest
from aiohttp import web

from tests.conftest import batchrun, eventually, job_of, printed, started, write_job, write_rows
from tests.support.fake_sglang import FakeSGLang
from tests.support.refusals import refusal, told
from tests.support.runs import machine, status_of
from tests.support.server_thread import ServerThread
from tests.support.store_server import rows_in_parts

BUCKET = "bucket"


def generation(content: bytes) -> int:
    """Return the number of the write that made an object."""
    return int(hashlib.md5(content, usedforsecurity=False).hexdigest()[:12], 16)


class CloudStore(ServerThread):
    """`with GoogleStore() as store: ... store.storage`."""

    scheme = ""
    missing = changed = ""
    """Codes of errors."""
    listed = entry = ""
    """The list of objects, and each in it: its key, generation and size."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{BUCKET}"

    @property
    def storage(self) -> dict[str, Any]:
        """The part `storage` of a job."""
        raise AssertionError("a subclass knows")

    def get(self, key: str) -> bytes:  # as that of S3 has it
        return self.objects[key]

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def add_routes(self, app: web.Application) -> None:
        app.router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        path = unquote(request.rel_url.raw_path).strip("/").removeprefix(f"{ACCOUNT}/")
        bucket, _, key = path.partition("/")
        if bucket != BUCKET:
            return self._refuse(404, {"gs": "NoSuchBucket", "az": "ContainerNotFound"}[self.scheme])
        if not key:
            return self._batch(request, body) if request.method == "POST" else self._list(request)
        if request.method == "PUT":
            return self._put(request, key, body)
        if request.method == "DELETE":
            return self._delete(key)
        return self._get(request, key)

    def _put(self, request: web.Request, key: str, body: bytes) -> web.Response:
        problem = self._conflict(request, self.objects.get(key))
        if problem is not None:
            return problem
        self.objects[key] = body
        status = 200 if self.scheme == "gs" else 201
        return web.Response(status=status, headers=self._headers(body))

    def _get(self, request: web.Request, key: str) -> web.Response:
        found = self.objects.get(key)
        if found is None:
            return self._refuse(404, self.missing)
        headers = self._headers(found)
        if request.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return self._refuse(412, self.changed)
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(found))})
        asked = request.http_range
        content = found[asked]
        if asked.start is None:
            return web.Response(body=content, headers=headers)
        where = f"bytes {asked.start}-{asked.start + len(content) - 1}/{len(found)}"
        return web.Response(status=206, body=content, headers={**headers, "Content-Range": where})

    def _delete(self, key: str) -> web.Response:
        if self.objects.pop(key, None) is None:
            return self._refuse(404, self.missing)
        return web.Response(status=204 if self.scheme == "gs" else 202)

    def _headers(self, found: bytes) -> dict[str, str]:
        number = str(generation(found))
        now = formatdate(usegmt=True)
        return {"ETag": f'"{number}"', "x-goog-generation": number, "Last-Modified": now}

    def _refuse(self, status: int, code: str) -> web.Response:
        text = f"<Error><Code>{code}</Code><Message>{code}.\nRequestId:1\nTime:2</Message></Error>"
        return web.Response(status=status, text=text, content_type="application/xml")

    def _conflict(self, request: web.Request, old: bytes | None) -> web.Response | None:
        raise AssertionError("a subclass knows")

    def _list(self, request: web.Request) -> web.Response:
        entries = "".join(
            self.entry.format(escape(key), generation(self.objects[key]), len(self.objects[key]))
            for key in self.keys(request.query.get("prefix", ""))
        )
        return web.Response(text=self.listed.format(entries), content_type="application/xml")

    def _batch(self, request: web.Request, body: bytes) -> web.Response:
        raise AssertionError("only Azure has this")


class GoogleStore(CloudStore):
    """Google Cloud Storage without credentials."""

    scheme = "gs"
    missing, changed = "NoSuchKey", "PreconditionFailed"
    listed = "<ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>"
    entry = (
        "<Contents><Key>{0}</Key><Generation>{1}</Generation><LastModified>2026-11-01T00:00:00.000Z</LastModified>"
        '<ETag>"{1}"</ETag><Size>{2}</Size></Contents>'
    )

    @property
    def storage(self) -> dict[str, Any]:
        return {"endpoint": self.url, "anonymous": True}

    def _conflict(self, request: web.Request, old: bytes | None) -> web.Response | None:
        wanted = request.headers.get("x-goog-if-generation-match")
        mine = 0 if old is None else generation(old)
        return None if wanted in {None, str(mine)} else self._refuse(412, self.changed)


ACCOUNT = "account"


class AzureStore(CloudStore):
    """The blob service of an account."""

    scheme = "az"
    missing, changed = "BlobNotFound", "ConditionNotMet"
    listed = "<EnumerationResults><Blobs>{}</Blobs><NextMarker /></EnumerationResults>"
    entry = (
        "<Blob><Name>{0}</Name><Properties><Last-Modified>Sun, 01 Nov 2026 00:00:00 GMT</Last-Modified>"
        "<Etag>{1}</Etag><Content-Length>{2}</Content-Length>"
        "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
    )

    @property
    def storage(self) -> dict[str, Any]:
        secrets = {"account_key": "KEY_OF_THE_TESTS"}
        return {"endpoint": f"{self.url}/{ACCOUNT}", "account": ACCOUNT, "secrets": secrets}

    def _conflict(self, request: web.Request, old: bytes | None) -> web.Response | None:
        if request.headers.get("If-None-Match") == "*" and old is not None:
            return self._refuse(409, "BlobAlreadyExists")
        wanted = request.headers.get("If-Match")
        is_same = wanted is None or (old is not None and wanted == f'"{generation(old)}"')
        return None if is_same else self._refuse(412, self.changed)

    def _batch(self, request: web.Request, body: bytes) -> web.Response:
        """Delete what the parts of the body name."""
        lines = [line for line in body.decode().splitlines() if line.startswith("DELETE ")]
        answers = []
        for number, line in enumerate(lines):
            path = unquote(line.split(" ")[1].partition("?")[0]).strip("/")
            key = path.removeprefix(f"{ACCOUNT}/").removeprefix(f"{BUCKET}/")
            status = (
                "202 Accepted" if self.objects.pop(key, None) else "404 The specified blob does not exist."
            )
            answers.append(
                "--batch\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\nx-ms-request-id: 1\r\n\r\n"
            )
        text = "\r\n".join([*answers, "--batch--"])
        return web.Response(
            status=202, body=text.encode(), headers={"Content-Type": "multipart/mixed; boundary=batch"}
        )


@pytest.fixture(params=[GoogleStore, AzureStore])
def store(
    request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudStore]:
    """A store of each cloud, with working copies of its own."""
    monkeypatch.setenv("KEY_OF_THE_TESTS", base64.b64encode(b"key").decode())
    with request.param() as running:
        yield running


def job_in(directory: Path, store: CloudStore, *given: Any, **changes: Any) -> Path:
    """Write a job whose results are in the store."""
    output = {"path": f"{store.uri}/run", "durable": 0.3}
    return write_job(job_of(directory, *given, output=output, storage=store.storage, **changes), directory)


def test_a_run(tmp_path: Path, store: CloudStore) -> None:
    """Input and results are in the store; a kill, the next start, and every command that reads the run."""
    for name in "ab":
        store.objects[f"in/{name}.parquet"] = write_rows(tmp_path / "x.parquet", 20).read_bytes()
    with FakeSGLang(lambda _: "hold" if len(server.prompts) > 20 else "answer") as server:
        file = job_in(tmp_path, store, server, input={"path": f"{store.uri}/in"}, window=4)
        with started(file) as run:
            eventually(lambda: store.keys("run/parts/"))
            run.kill()
        server.answer_held()
        server.script = lambda _: "answer"
        assert printed(file)["rows_resumed"] > 0
        assert rows_in_parts(store) == list(range(40))
        uri = f"{store.uri}/run"
        state = status_of(uri)
        assert (state["rows_on_disk"], state["finished"]) == (40, True)
        for _ in range(2):
            merged = batchrun("merge", uri)
            assert (merged.exit_code, merged.stdout.strip()) == (0, f"{uri}/merged"), merged.stderr
        assert "run/merged/_SUCCESS" in store.objects
        assert batchrun(file, "--fresh").exit_code == 0
    assert store.keys("run/merged/") == []


def test_tasks_that_join(tmp_path: Path, store: CloudStore) -> None:
    """A task that is killed is followed by one on another machine, which knows what the dead one had done."""
    with FakeSGLang(lambda sent: "hold" if sent.prompt.endswith("7") else "answer") as server:
        file = job_in(tmp_path, store, server, rows=30, window=30)
        with machine("a", file, "--join") as first:
            eventually(lambda: store.keys("run/parts/"))
            first.kill()
        server.script = lambda _: "answer"
        server.answer_held()
        with machine("b", file, "--join") as second:
            second.wait_for_line("took over from")
            assert second.end() == 0
    assert rows_in_parts(store) == list(range(30))


def test_what_is_wrong(tmp_path: Path, store: CloudStore) -> None:
    """A bucket that is not there is one line, with exit code 2."""
    job = job_of(tmp_path, output={"path": f"{store.scheme}://nobody/run"}, storage=store.storage)
    told(refusal(job, tmp_path), f"output.path {store.scheme}://nobody/run", "there is no such")
