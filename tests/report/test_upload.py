"""`batchrunner merge RUN URI`: results and their card in an object store and on the Hub, here stand-ins."""

import base64
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from aiohttp import web

import batchrunner
from batchrunner.core.errors import OutputError
from batchrunner.output.objects import RunObjects
from batchrunner.output.run_dir import look_at_run
from batchrunner.report.report import report_of_all
from batchrunner.report.upload import upload
from tests.conftest import INSTANT, batchrun, job_of, merged_table, started_python
from tests.support.server_thread import ServerThread
from tests.support.store_server import StoreBucket

REPO = "owner/answers"


class EmptyHub(ServerThread):
    """A Hub with one dataset, which takes files in the body of a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {".gitattributes": b""}
        self.visibility = ""

    def add_routes(self, app: web.Application) -> None:
        api = f"/api/datasets/{REPO}"
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/validate-yaml", self._validate)
        app.router.add_get(f"{api}/tree/main", self._tree)
        app.router.add_post(f"{api}/preupload/main", self._preupload)
        app.router.add_post(f"{api}/commit/main", self._commit)

    async def _create(self, request: web.Request) -> web.Response:
        self.visibility = (await request.json())["visibility"]
        return web.json_response({"url": f"{self.url}/datasets/{REPO}"})

    async def _validate(self, _: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def _tree(self, _: web.Request) -> web.Response:
        return web.json_response(
            [{"type": "file", "path": path, "oid": "0", "size": 1} for path in self.files]
        )

    async def _preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        return web.json_response(
            {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files
                ]
            }
        )

    async def _commit(self, request: web.Request) -> web.Response:
        for line in (await request.text()).splitlines():
            change = json.loads(line)
            if change["key"] == "file":
                self.files[change["value"]["path"]] = base64.b64decode(change["value"]["content"])
            elif change["key"] == "deletedFile":
                del self.files[change["value"]["path"]]
        return web.json_response(
            {"commitUrl": f"{self.url}/datasets/{REPO}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        )


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A finished run of ten rows."""
    prompt = {"user": "# Say {{ text }}"}
    batchrunner.run(job_of(tmp_path, INSTANT, prompt=prompt, sampling={"max_new_tokens": 4}))
    return tmp_path / "run"


def check_card(card: str) -> None:
    assert "data_files: data/*.parquet" in card
    assert '    "user": "# Say {{ text }}"' in card
    assert '    "max_new_tokens": 4' in card
    assert "- Rows: 10 ok and 0 failed of 10\n- The engine was simulated" in card


def test_results_in_a_store(run: Path, store_bucket: StoreBucket) -> None:
    """The directory gets the merged files and the card; what is there is replaced only with --force."""
    uri = f"{store_bucket.uri}/answers"
    done = batchrun("merge", run, uri)
    assert (done.exit_code, done.stdout) == (0, f"{uri}\n"), done.stderr
    check_card(store_bucket.get("answers/README.md").decode())
    stored = pq.read_table(io.BytesIO(store_bucket.get("answers/data/merged-000000.parquet")))
    assert stored.equals(merged_table(run))
    store_bucket.put("answers/data/old.parquet", b"old")
    refused = batchrun("merge", run, uri)
    assert (refused.exit_code, f"{uri}: is not empty: give --force" in refused.stderr) == (2, True)
    assert batchrun("merge", run, uri, "--force").exit_code == 0
    assert store_bucket.keys() == ["answers/README.md", "answers/data/merged-000000.parquet"]


def test_no_card_of_other_data(run: Path, store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """While --force replaces data, and after it has failed, no card stands beside data of another run."""
    uri = f"{store_bucket.uri}/answers"
    assert batchrun("merge", run, uri).exit_code == 0
    store_bucket.put("answers/data/old.parquet", b"old")
    keys: list[tuple[str, list[str]]] = []
    put = RunObjects.put

    def watched_put(objects: RunObjects, name: str, content: bytes | Path) -> str:
        keys.append((name, store_bucket.keys()))
        if len(keys) == 1:
            raise OSError("the connection broke")
        return put(objects, name, content)

    monkeypatch.setattr(RunObjects, "put", watched_put)
    run_dir, report = look_at_run(run), report_of_all(run)
    with pytest.raises(OutputError, match="the connection broke"):
        upload(run_dir, report, uri, force=True)
    assert store_bucket.keys() == ["answers/data/merged-000000.parquet", "answers/data/old.parquet"]
    upload(run_dir, report, uri, force=True)
    data = "answers/data/merged-000000.parquet"
    assert keys[1:] == [
        ("data/merged-000000.parquet", [data, "answers/data/old.parquet"]),
        ("README.md", [data]),
    ]


def test_results_on_the_hub(run: Path) -> None:
    """One commit of a private dataset has the merged files and the card; --force replaces old files."""
    pytest.importorskip("huggingface_hub")

    def merge(*options: str) -> tuple[int, str]:
        command = ("-m", "batchrunner", "merge", run, f"hf://datasets/{REPO}", *options)
        environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
        with started_python(*command, **environ) as running:
            status = running.end()
        return status, "".join(running.lines)

    with EmptyHub() as hub:
        status, told = merge()
        assert status == 0, told
        assert hub.visibility == "private"
        check_card(hub.files["README.md"].decode())
        stored = pq.read_table(io.BytesIO(hub.files["data/merged-000000.parquet"]))
        assert stored.equals(merged_table(run))
        hub.files["data/old.parquet"] = b"old"
        status, told = merge()
        assert (status, "is not empty: give --force" in told) == (2, True), told
        assert merge("--force")[0] == 0
        assert sorted(hub.files) == [".gitattributes", "README.md", "data/merged-000000.parquet"]
