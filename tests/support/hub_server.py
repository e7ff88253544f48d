"""A stand-in for the Hugging Face Hub with one data set, as huggingface_hub reads and writes it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from aiohttp import web

from tests.support.server_thread import ServerThread, end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REPO = "owner/rows"
TOKEN = "hf_of_the_tests"
BIG = 20_000
"""Bytes from which on a file goes to the storage for large files, before the commit."""
CommitFault: TypeAlias = Literal["none"] | int
"""What becomes of a commit: a number is the status that it is refused with."""


@dataclass
class Branch:
    """What a branch of the data set holds, and its last commit."""

    files: dict[str, bytes]
    sha: str = field(default_factory=lambda: secrets.token_hex(20))

    def commit(self) -> None:
        self.sha = secrets.token_hex(20)


class HubServer(ServerThread):
    """`with HubServer(files) as hub: ... hub.url`; `files` are contents by path."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.branches = {"main": Branch(files or {})}
        self.commits = 0
        """Commits that were made."""
        self.faults: list[CommitFault] = []
        """What becomes of the next commits."""
        self.closed: tuple[int, str] | None = None
        """Status and code with which the data set is refused: it is gated, or its token may not write."""
        self.url = ""
        self._large: dict[str, bytes] = {}

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"].files

    def replace(self, path: str, content: bytes) -> None:
        """Give the data set another file, by another commit."""
        self.files[path] = content
        self.branches["main"].commit()

    async def _serve(self) -> None:
        self._begin()
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        api, git = f"/api/datasets/{REPO}", f"/datasets/{REPO}"
        app.router.add_get(api, self._repo)
        app.router.add_get(f"{api}/revision/{{revision}}", self._repo)
        app.router.add_get(f"{api}/tree/{{revision}}", self._tree)
        app.router.add_get(f"{api}/tree/{{revision}}/{{path:.*}}", self._tree)
        app.router.add_post(f"{api}/paths-info/{{revision}}", self._paths)
        app.router.add_post(f"{api}/preupload/{{revision}}", self._modes)
        app.router.add_post(f"{api}/commit/{{revision}}", self._commit)
        app.router.add_get(f"{git}/resolve/{{revision}}/{{path:.*}}", self._file)
        app.router.add_post(f"{git}.git/info/lfs/objects/batch", self._batch)
        app.router.add_put("/large/{oid}", self._upload)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        await self._over.wait()
        await end(runner)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what is closed, another data set, and a branch that is not there."""
        await asyncio.sleep(0)
        is_gated = self.closed is not None and self.closed[1] == "GatedRepo"
        if self.closed is not None and (not is_gated or "/resolve/" in request.path):  # its names are public
            return _refuse(*self.closed)
        if f"datasets/{REPO}" not in request.path and not request.path.startswith("/large/"):
            return _refuse(404, "RepoNotFound")
        revision = request.match_info.get("revision")
        if revision is not None and self._branch(revision) is None:
            return _refuse(404, "RevisionNotFound")
        is_write = request.method == "POST" and "paths-info" not in request.path
        if is_write and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _refuse(401, "", "Invalid username or password.")
        return await handler(request)

    def _branch(self, revision: str) -> Branch | None:
        return self.branches.get(revision) or next(
            (each for each in self.branches.values() if each.sha == revision), None
        )

    def _of(self, request: web.Request) -> Branch:
        found = self._branch(request.match_info.get("revision", "main"))
        assert found is not None
        return found

    async def _repo(self, request: web.Request) -> web.Response:
        return web.json_response({"id": REPO, "sha": self._of(request).sha, "private": False, "siblings": []})

    async def _tree(self, request: web.Request) -> web.Response:
        files = self._of(request).files
        directory = request.match_info.get("path", "")
        beginning = f"{directory}/" if directory else ""
        below = [path for path in files if path.startswith(beginning)]
        found = {beginning + path.removeprefix(beginning).partition("/")[0] for path in below}
        if request.query.get("recursive", "").lower() == "true":
            found |= {*below}
            found |= {
                "/".join(path.split("/")[:depth]) for path in below for depth in range(1, path.count("/") + 1)
            }
            found = {path for path in found if path.startswith(beginning) and path != directory}
        if not found and directory:
            return _refuse(404, "EntryNotFound")
        return web.json_response([_entry(files, path) for path in sorted(found)])

    async def _paths(self, request: web.Request) -> web.Response:
        files = self._of(request).files
        asked = [str(path) for path in (await request.post()).getall("paths", [])]
        there = [
            path for path in asked if path in files or any(file.startswith(f"{path}/") for file in files)
        ]
        return web.json_response([_entry(files, path) for path in there])

    async def _file(self, request: web.Request) -> web.Response:
        branch = self._of(request)
        content = branch.files.get(request.match_info["path"])
        if content is None:
            return _refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": branch.sha, "Accept-Ranges": "bytes"}
        begin, end_ = 0, len(content)
        if found := request.http_range:
            begin, end_ = found.start or 0, min(found.stop or end_, end_)
        status = 206 if request.headers.get("Range") else 200
        return web.Response(body=content[begin:end_], status=status, headers=headers)

    async def _modes(self, request: web.Request) -> web.Response:
        files, asked = self._of(request).files, (await request.json())["files"]
        return web.json_response({"files": [self._mode(files, each["path"], each["size"]) for each in asked]})

    def _mode(self, files: dict[str, bytes], path: str, size: int) -> dict[str, object]:
        is_big, content = size >= BIG, files.get(path)
        oid = None if content is None else (_sha256(content) if is_big else _oid(content))
        mode = "lfs" if is_big else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    async def _batch(self, request: web.Request) -> web.Response:
        objects: list[dict[str, object]] = []
        for each in (await request.json())["objects"]:
            actions = {"upload": {"href": f"{self.url}/large/{each['oid']}", "header": {}}}
            objects.append(each if each["oid"] in self._large else {**each, "actions": actions})
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _upload(self, request: web.Request) -> web.Response:
        content = await request.read()
        assert _sha256(content) == request.match_info["oid"]
        self._large[request.match_info["oid"]] = content
        return web.Response()

    async def _commit(self, request: web.Request) -> web.StreamResponse:
        branch = self._of(request)
        fault = self.faults.pop(0) if self.faults else "none"
        if isinstance(fault, int):
            return _refuse(fault, "", f"This is {fault}.")
        changes = [json.loads(line) for line in (await request.text()).splitlines()]
        if changes[0]["value"].get("parentCommit", branch.sha) != branch.sha:
            return _refuse(412, "", "A commit has happened since. Please refresh and try again.")
        for change in changes[1:]:
            path = change["value"]["path"]
            if change["key"] == "deletedFile":
                del branch.files[path]
            elif change["key"] == "lfsFile":
                branch.files[path] = self._large[change["value"]["oid"]]
            else:
                branch.files[path] = base64.b64decode(change["value"]["content"])
        branch.commit()
        self.commits += 1
        url = f"{self.url}/datasets/{REPO}/commit/{branch.sha}"
        return web.json_response({"success": True, "commitOid": branch.sha, "commitUrl": url})


def _refuse(status: int, code: str, message: str = "") -> web.Response:
    headers = {"X-Error-Code": code} if code else {}
    return web.json_response({"error": message or code}, status=status, headers=headers)


def _entry(files: dict[str, bytes], path: str) -> dict[str, object]:
    content = files.get(path)
    if content is None:
        return {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())}
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}


def _oid(content: bytes) -> str:
    """Return the name that git has for a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
