"""Stand-ins for Google Cloud Storage (its XML API) and Azure's blob service, each with one bucket.

They have what differs from S3: Google's conditions name generations, which its listings do not tell; Azure's
listings have e_tags without quotes; both answer 404 for the deletion of what is not there.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.support.server_thread import ServerThread, end

BUCKET = "bucket"
CHANGED = "2026-11-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and the number of the write that made it."""

    content: bytes
    generation: int


class CloudStore(ServerThread):
    """`with GoogleStore() as store: ... store.storage`."""

    scheme = ""
    missing = exists = changed = ""
    """Codes of errors."""
    exists_status = 412

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Stored] = {}
        self.url = ""
        self._generations = itertools.count(1)

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{BUCKET}"

    @property
    def storage(self) -> dict[str, Any]:
        """The part `storage` of a job."""
        raise AssertionError("a subclass knows")

    @property
    def environ(self) -> dict[str, str]:
        """Variables that the part `storage` needs."""
        return {}

    def put(self, key: str, content: bytes) -> Stored:
        self.objects[key] = Stored(content, next(self._generations))
        return self.objects[key]

    def get(self, key: str) -> bytes:
        return self.objects[key].content

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    async def _serve(self) -> None:
        self._begin()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        await self._over.wait()
        await end(runner)

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
        status = 200 if self.scheme == "gs" else 201
        return web.Response(status=status, headers=self._headers(self.put(key, body)))

    def _get(self, request: web.Request, key: str) -> web.Response:
        found = self.objects.get(key)
        if found is None:
            return self._refuse(404, self.missing)
        headers = self._headers(found)
        if request.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return self._refuse(412, self.changed)
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(found.content))})
        asked = request.http_range
        content = found.content[asked]
        if asked.start is None:
            return web.Response(body=content, headers=headers)
        where = f"bytes {asked.start}-{asked.start + len(content) - 1}/{len(found.content)}"
        return web.Response(status=206, body=content, headers={**headers, "Content-Range": where})

    def _delete(self, key: str) -> web.Response:
        if self.objects.pop(key, None) is None:
            return self._refuse(404, self.missing)
        return web.Response(status=204 if self.scheme == "gs" else 202)

    def _headers(self, found: Stored) -> dict[str, str]:
        return {"ETag": f'"{self.e_tag(found)}"', "Last-Modified": formatdate(usegmt=True)}

    def _refuse(self, status: int, code: str) -> web.Response:
        text = f"<Error><Code>{code}</Code><Message>{code}.\nRequestId:1\nTime:2</Message></Error>"
        return web.Response(status=status, text=text, content_type="application/xml")

    def e_tag(self, found: Stored) -> str:
        raise AssertionError("a subclass knows")

    def _conflict(self, request: web.Request, old: Stored | None) -> web.Response | None:
        raise AssertionError("a subclass knows")

    def _list(self, request: web.Request) -> web.Response:
        raise AssertionError("a subclass knows")

    def _batch(self, request: web.Request, body: bytes) -> web.Response:
        raise AssertionError("only Azure has this")


class GoogleStore(CloudStore):
    """Google Cloud Storage without credentials."""

    scheme = "gs"
    missing, changed = "NoSuchKey", "PreconditionFailed"

    @property
    def storage(self) -> dict[str, Any]:
        return {"endpoint": self.url, "anonymous": True}

    def e_tag(self, found: Stored) -> str:
        return hashlib.md5(found.content, usedforsecurity=False).hexdigest()

    def _headers(self, found: Stored) -> dict[str, str]:
        return {**super()._headers(found), "x-goog-generation": str(found.generation)}

    def _conflict(self, request: web.Request, old: Stored | None) -> web.Response | None:
        wanted = request.headers.get("x-goog-if-generation-match")
        mine = old.generation if old else 0
        return None if wanted in {None, str(mine)} else self._refuse(412, self.changed)

    def _list(self, request: web.Request) -> web.Response:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{self.objects[key].generation}</Generation>"
            f'<LastModified>{CHANGED}</LastModified><ETag>"{self.e_tag(self.objects[key])}"</ETag>'
            f"<Size>{len(self.objects[key].content)}</Size></Contents>"
            for key in self.keys(request.query.get("prefix", ""))
        )
        return web.Response(
            text=f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>",
            content_type="application/xml",
        )


ACCOUNT = "account"


class AzureStore(CloudStore):
    """The blob service of an account."""

    scheme = "az"
    missing, changed = "BlobNotFound", "ConditionNotMet"

    @property
    def storage(self) -> dict[str, Any]:
        secrets = {"account_key": "KEY_OF_THE_TESTS"}
        return {"endpoint": f"{self.url}/{ACCOUNT}", "account": ACCOUNT, "secrets": secrets}

    @property
    def environ(self) -> dict[str, str]:
        return {"KEY_OF_THE_TESTS": base64.b64encode(b"key").decode()}

    def e_tag(self, found: Stored) -> str:
        return f"0x{found.generation:X}"

    def _conflict(self, request: web.Request, old: Stored | None) -> web.Response | None:
        if request.headers.get("If-None-Match") == "*" and old is not None:
            return self._refuse(409, "BlobAlreadyExists")
        wanted = request.headers.get("If-Match")
        is_same = wanted is None or (old is not None and wanted == f'"{self.e_tag(old)}"')
        return None if is_same else self._refuse(412, self.changed)

    def _list(self, request: web.Request) -> web.Response:
        entries = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}"
            f"</Last-Modified><Etag>{self.e_tag(self.objects[key])}</Etag>"
            f"<Content-Length>{len(self.objects[key].content)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key in self.keys(request.query.get("prefix", ""))
        )
        return web.Response(
            text=f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker /></EnumerationResults>",
            content_type="application/xml",
        )

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
