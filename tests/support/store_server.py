"""A store that speaks S3 (moto, in a process of its own), and a proxy before it that fails on demand."""

import asyncio
import contextlib
import io
import secrets
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import boto3
import pyarrow.parquet as pq
from aiohttp import web
from yarl import URL

from batchrunner.engines.http.connections import free_port
from tests.support.server_thread import PATIENCE_S, ServerThread

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True)
class StoreBucket:
    """A bucket of the store."""

    endpoint: str
    name: str

    @property
    def uri(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, content: bytes | Path) -> None:
        body = content if isinstance(content, bytes) else content.read_bytes()
        self.client().put_object(Bucket=self.name, Key=key, Body=body)

    def get(self, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return sorted(found["Key"] for page in pages for found in page.get("Contents", ()))

    def make_public(self) -> None:
        for key in self.keys():
            self.client().put_object_acl(Bucket=self.name, Key=key, ACL="public-read")
        self.client().put_bucket_acl(Bucket=self.name, ACL="public-read")

    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id="of-the-tests", aws_secret_access_key="secret",
        )  # fmt: skip


def new_bucket(endpoint: str) -> StoreBucket:
    """Return a bucket that is new."""
    bucket = StoreBucket(endpoint, f"bucket-{secrets.token_hex(4)}")
    bucket.client().create_bucket(Bucket=bucket.name)
    return bucket


def rows_in_parts(bucket: Any) -> list[int]:
    """Return the ordinals of the rows of all parts of `run`, as any reader of the bucket finds them."""
    keys = [key for key in bucket.keys("run/parts/") if key.endswith(".parquet")]
    return sorted(
        row for key in keys for row in pq.read_table(io.BytesIO(bucket.get(key)))["row"].to_pylist()
    )


@contextlib.contextmanager
def store_server() -> Iterator[str]:
    """Run the store; give its address."""
    port = free_port()  # one that no connection is given meanwhile
    command = [sys.executable, str(Path(__file__).with_name("moto_store.py")), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    from tests.conftest import eventually  # noqa: PLC0415 - it imports this

    def answers() -> bool:
        assert process.poll() is None, "the store did not start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    eventually(answers, PATIENCE_S)


Fault: TypeAlias = Literal[
    "none",
    "slow down",  # 503, as S3 says it
    "reset",  # the connection ends before the store gets the request
    "lost reply",  # the store does it, and the connection ends
    "half answer",  # half of the body comes
    "late",  # a second late
    "held",  # the store gets it when `let_go` is called
    "no conditions",  # the store does not get what makes a write conditional
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the store says instead of doing it."""

    status: int
    code: str

    @property
    def body(self) -> bytes:
        text = f"<Error><Code>{self.code}</Code><Message>This is {self.code}.</Message></Error>"
        return f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()


Faults: TypeAlias = Callable[[str, str, int], Fault | Refusal]
"""What becomes of a request: of its method, its path, and how often this was asked before."""
SLOW_DOWN = Refusal(503, "SlowDown")
CONDITIONS = {"if-none-match", "if-match"}


class StoreProxy(ServerThread):
    """`with StoreProxy(address) as proxy: ... proxy.url`; `faults` says what becomes of each request."""

    cancels = False

    def __init__(self, address: str, faults: Faults = lambda *_: "none") -> None:
        super().__init__()
        self._address = address
        self.faults = faults
        self.asked: Counter[tuple[str, str]] = Counter()
        """How often each request came, by method and path."""
        self.held = 0
        """Requests that were held back."""
        self.passed = 0
        """Those of them that the store has answered since."""

    def let_go(self) -> None:
        """Send what was held back to the store."""
        self._loop.call_soon_threadsafe(self._let_go.set)

    def add_routes(self, app: web.Application) -> None:
        self._let_go = asyncio.Event()
        app.router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key = request.method, request.path
        fault = self.faults(*key, self.asked[key])
        self.asked[key] += 1
        if fault == "slow down":
            fault = SLOW_DOWN
        if isinstance(fault, Refusal):
            return web.Response(status=fault.status, body=fault.body, content_type="application/xml")
        if fault == "reset":
            return self._cut(request)
        if fault == "late":
            await asyncio.sleep(1)
        body = await request.read()
        if fault == "held":
            self.held += 1
            await self._let_go.wait()
        skipped = {"host", "content-length", "transfer-encoding"}
        if fault == "no conditions":
            skipped |= CONDITIONS
        headers = {name: value for name, value in request.headers.items() if name.lower() not in skipped}
        url = f"{self._address}{request.raw_path}"
        async with self.session.request(
            request.method, URL(url, encoded=True), headers=headers, data=body
        ) as reply:
            content = await reply.read()
            self.passed += fault == "held"
            if fault == "lost reply":
                return self._cut(request)
            dropped = {"content-length", "transfer-encoding", "connection", "server", "date"}
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in dropped}
            if request.method == "HEAD":
                kept["Content-Length"] = reply.headers.get("Content-Length", "0")
                return web.Response(status=reply.status, headers=kept)
            if fault == "half answer" and content:
                answer = web.StreamResponse(
                    status=reply.status, headers={**kept, "Content-Length": str(len(content))}
                )
                await answer.prepare(request)
                await answer.write(content[: len(content) // 2])
                return self._cut(request, answer)
            return web.Response(status=reply.status, headers=kept, body=content)

    def _cut(self, request: web.Request, answer: web.StreamResponse | None = None) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort() if answer is None else request.transport.close()
        return answer or web.Response()
