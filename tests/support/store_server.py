"""A store that speaks S3 (moto, in a process of its own), with buckets for the tests."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import boto3

from batchrunner.engines.http.connections import free_port
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@contextlib.contextmanager
def store_server() -> Iterator[str]:
    """Run the store; give its address."""
    port = free_port()  # one that no connection is given meanwhile
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
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
