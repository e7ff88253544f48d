"""Input and models from the Hugging Face Hub, here a stand-in on this machine."""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from batchrunner.engines.http.connections import free_port
from tests.conftest import (
    column_of,
    job_of,
    run_job,
    started,
    started_python,
    write_job,
    write_rows,
)
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.launchable import with_slots
from tests.support.refusals import told
from tests.support.server_thread import ServerThread

pytest.importorskip("huggingface_hub")
REPO = "owner/rows"


class HubServer(ServerThread):
    """`with HubServer(files) as hub: ... hub.url`; `files` are contents by path."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.files = files
        self.branches = {"main": files}
        self.models: set[str] = set()
        """Names of the models that there are."""
        self.gated = False
        """Whether the files are refused; their names are public."""

    def add_routes(self, app: web.Application) -> None:
        app.middlewares.append(self._guard)
        api = f"/api/datasets/{REPO}"
        app.router.add_get(api, self._repo)
        app.router.add_get(f"{api}/revision/{{revision}}", self._repo)
        app.router.add_get(f"{api}/tree/{{revision}}", self._tree)
        app.router.add_get(f"{api}/tree/{{revision}}/{{path:.*}}", self._tree)
        app.router.add_post(f"{api}/paths-info/{{revision}}", self._paths)
        app.router.add_get(f"/datasets/{REPO}/resolve/{{revision}}/{{path:.*}}", self._file)
        app.router.add_get("/api/models/{name:.*}", self._model)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what is closed, another data set, and a branch that is not there."""
        await asyncio.sleep(0)
        if request.path.startswith("/api/models/"):
            return await handler(request)
        if self.gated and "/resolve/" in request.path:
            return _refuse(403, "GatedRepo")
        if f"datasets/{REPO}" not in request.path:
            return _refuse(404, "RepoNotFound")
        revision = request.match_info.get("revision")
        if revision is not None and self._branch(revision) is None:
            return _refuse(404, "RevisionNotFound")
        return await handler(request)

    def _branch(self, revision: str) -> dict[str, bytes] | None:
        return self.branches.get(revision) or next(
            (files for files in self.branches.values() if _commit(files) == revision), None
        )

    def _of(self, request: web.Request) -> dict[str, bytes]:
        found = self._branch(request.match_info.get("revision", "main"))
        assert found is not None
        return found

    async def _repo(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"id": REPO, "sha": _commit(self._of(request)), "private": False, "siblings": []}
        )

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({"id": name}) if name in self.models else _refuse(404, "RepoNotFound")

    async def _tree(self, request: web.Request) -> web.Response:
        files = self._of(request)
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
        files = self._of(request)
        asked = [str(path) for path in (await request.post()).getall("paths", [])]
        there = [
            path for path in asked if path in files or any(file.startswith(f"{path}/") for file in files)
        ]
        return web.json_response([_entry(files, path) for path in there])

    async def _file(self, request: web.Request) -> web.Response:
        files = self._of(request)
        content = files.get(request.match_info["path"])
        if content is None:
            return _refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": _commit(files), "Accept-Ranges": "bytes"}
        begin, end_ = 0, len(content)
        if found := request.http_range:
            begin, end_ = found.start or 0, min(found.stop or end_, end_)
        status = 206 if request.headers.get("Range") else 200
        return web.Response(body=content[begin:end_], status=status, headers=headers)


def _refuse(status: int, code: str) -> web.Response:
    return web.json_response({"error": code}, status=status, headers={"X-Error-Code": code})


def _entry(files: dict[str, bytes], path: str) -> dict[str, object]:
    content = files.get(path)
    if content is None:
        return {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())}
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}


def _commit(files: dict[str, bytes]) -> str:
    """Return the name of the commit of these files."""
    return _oid("".join(f"{path} {_oid(files[path])}" for path in sorted(files)).encode())


def _oid(content: bytes) -> str:
    """Return the name that git has for a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def rows(directory: Path, first: int, count: int = 5) -> bytes:
    """Return the content of a file with rows."""
    return write_rows(directory / "x.parquet", count, first=first).read_bytes()


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A data set with two splits below a configuration, and a branch with one file."""
    splits = {f"en/{split}/0.parquet": rows(tmp_path, first) for split, first in (("test", 0), ("train", 5))}
    with HubServer({**splits, "README.md": b"a data set"}) as running:
        running.branches["old"] = {"en/test/0.parquet": rows(tmp_path, 90)}
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield running


PATHS = {
    "/en/train/0.parquet": range(5, 10),
    "/en": range(10),
    "/en/*/0.parquet": range(10),
    "@old/en/test": range(90, 95),
}
"""Paths in the data set, and what the column `id` of their rows has."""
COMMANDS = """
import sys
from batchrunner.cli import main
for file in sys.argv[1:]:
    sys.argv = ["batchrun", file]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code, file=sys.stderr)
"""
"""The command for one job after the other, in a process that learns of the stand-in."""


def test_a_data_set(tmp_path: Path, data_set: HubServer) -> None:
    """A file, a directory, a pattern, and another branch are read, and the same command resumes."""
    jobs, files = [], []
    for number, path in enumerate(PATHS):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = job_of(directory, input={"path": f"hf://datasets/{REPO}{path}", "columns": ["id"]})
        jobs.append(job)
        files += [write_job(job, directory)] * 2
    with started_python("-c", COMMANDS, *files) as runs:
        assert runs.end() == 0
    ends = [line.split()[-1] for line in runs.lines if line.startswith("ended with")]
    assert ends == ["0"] * len(files), runs.lines
    assert [column_of(job, "id") for job in jobs] == [list(ids) for ids in PATHS.values()]


@pytest.mark.parametrize(
    ("path", "gated", "words"),
    [
        ("datasets/owner/nothing/a.parquet", False, "owner/nothing"),
        (f"datasets/{REPO}@nothing/en", False, "nothing"),
        (f"datasets/{REPO}/fr", False, "fr"),
        (f"datasets/{REPO}/en", True, "403"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, data_set: HubServer, path: str, gated: bool, words: str) -> None:
    """One line names the address and why, with exit code 2, before anything is sent."""
    data_set.gated = gated
    file = write_job(job_of(tmp_path, input={"path": f"hf://{path}"}), tmp_path)
    with started(file) as run:
        assert run.end() == 2
    (line,) = run.lines
    told(line, f"batchrun: hf://{path}", words)


def test_a_commit_during_the_run(tmp_path: Path, data_set: HubServer) -> None:
    """The run reads the files as they were when it began; the next start says which one changed since."""
    pad = [secrets.token_bytes(200_000) for _ in range(60)]  # later row groups are fetched later
    old = write_rows(tmp_path / "x.parquet", 60, pad=pad).read_bytes()
    new = write_rows(tmp_path / "x.parquet", 60, first=500, pad=pad).read_bytes()
    data_set.files["en/train/0.parquet"] = old

    def replacing(_: Sent) -> Behaviour:
        if data_set.files["en/train/0.parquet"] == old:
            data_set.files["en/train/0.parquet"] = new
        return "answer"

    with FakeSGLang(replacing) as server:
        job = job_of(
            tmp_path, server, input={"path": f"hf://datasets/{REPO}/en/train", "columns": ["id", "pad"]}
        )
        file = write_job(job, tmp_path)
        for code in (0, 2):
            with started(file) as run:
                assert run.end() == code
        told(run.lines[-1], "en/train/0.parquet changed")
    assert column_of(job, "id") == list(range(60))


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("reachable", [True, False])
def test_a_model_that_cannot_be_had(
    tmp_path: Path, data_set: HubServer, monkeypatch: pytest.MonkeyPatch, *, reachable: bool
) -> None:
    """One line says so with exit code 2, before a server starts."""
    if not reachable:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    job = job_of(tmp_path, with_slots(tmp_path) | {"model": "owner/nothing"})
    (line,) = run_job(job, tmp_path, code=2).stderr.splitlines()
    why = f"{data_set.url} has no such model" if reachable else "is not on this machine, and http"
    told(line, "engine.model: owner/nothing: ", why)
    assert not (tmp_path / "starts").exists()


@pytest.mark.usefixtures("quick_retries", "data_set")
@pytest.mark.parametrize("where", ["on the Hub", "in the cache", "elsewhere"])
def test_a_model_that_may_be_had(
    tmp_path: Path, data_set: HubServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The server starts, without a network too where the model is here or its variables lead elsewhere."""
    engine = with_slots(tmp_path) | {"model": "owner/model"}
    if where == "on the Hub":
        data_set.models.add("owner/model")
    else:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    if where == "in the cache":
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        (tmp_path / "models--owner--model" / "snapshots" / "main").mkdir(parents=True)
    if where == "elsewhere":
        engine["env"] |= {"HF_HOME": str(tmp_path)}
    job = job_of(tmp_path, engine)
    run_job(job, tmp_path)
    assert len(column_of(job, "row")) == 10
