"""A stand-in for the Hugging Face Hub with one data set, as `hf://datasets/OWNER/NAME/...` is read."""

from __future__ import annotations

import asyncio
import hashlib

from aiohttp import web

from tests.support.server_thread import ServerThread

REPO = "owner/rows"
COMMIT = "c" * 40


class HubServer(ServerThread):
    """`with HubServer(files) as hub: ... hub.url`; `files` are contents by path."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self._files = files
        self.url = ""

    async def _serve(self) -> None:
        self._begin()
        app = web.Application()
        api = f"/api/datasets/{REPO}"
        app.router.add_get(f"{api}", self._repo)
        app.router.add_get(f"{api}/revision/{{revision}}", self._repo)
        app.router.add_get(f"{api}/tree/{{revision}}", self._tree)
        app.router.add_get(f"{api}/tree/{{revision}}/{{path:.*}}", self._tree)
        app.router.add_post(f"{api}/paths-info/{{revision}}", self._paths)
        app.router.add_get(f"/datasets/{REPO}/resolve/{{revision}}/{{path:.*}}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        await self._over.wait()
        await runner.cleanup()

    async def _repo(self, _: web.Request) -> web.Response:
        await asyncio.sleep(0)
        return web.json_response({"id": REPO, "sha": COMMIT, "private": False, "siblings": []})

    async def _tree(self, request: web.Request) -> web.Response:
        directory = request.match_info.get("path", "")
        beginning = f"{directory}/" if directory else ""
        below = [path for path in self._files if path.startswith(beginning)]
        found = {beginning + path.removeprefix(beginning).partition("/")[0] for path in below}
        if request.query.get("recursive", "").lower() == "true":
            found |= {*below}
        if not found:
            return web.json_response(
                {"error": "Entry not found"}, status=404, headers=_error("EntryNotFound")
            )
        await asyncio.sleep(0)
        return web.json_response([self._entry(path) for path in sorted(found)])

    async def _paths(self, request: web.Request) -> web.Response:
        asked = [str(path) for path in (await request.post()).getall("paths", [])]
        return web.json_response([self._entry(path) for path in asked if self._is_there(path)])

    async def _file(self, request: web.Request) -> web.Response:
        content = self._files.get(request.match_info["path"])
        if content is None:
            return web.json_response(
                {"error": "Entry not found"}, status=404, headers=_error("EntryNotFound")
            )
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, end = 0, len(content)
        if found := request.http_range:
            begin, end = found.start or 0, min(found.stop or end, end)
        await asyncio.sleep(0)
        status = 206 if request.headers.get("Range") else 200
        return web.Response(body=content[begin:end], status=status, headers=headers)

    def _is_there(self, path: str) -> bool:
        return path in self._files or any(file.startswith(f"{path}/") for file in self._files)

    def _entry(self, path: str) -> dict[str, object]:
        content = self._files.get(path)
        if content is None:
            return {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())}
        return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _error(code: str) -> dict[str, str]:
    return {"X-Error-Code": code}
