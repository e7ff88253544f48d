"""`batchrun serve`: each answer of the API is one of the types of OpenAI's client."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    FileDeleted,
    FileObject,
    Model,
)
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ConfigDict

from tests.e2e.test_serve import FAST, SLOW, Server, requests_of, serving

BODIES: dict[str, tuple[dict[str, Any], type[BaseModel]]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "n": 2}, ChatCompletion),
    "/v1/completions": ({"prompt": ["a", "b"]}, Completion),
    "/v1/responses": ({"input": "a", "max_output_tokens": 3}, Response),
    "/v1/embeddings": ({"input": ["a"]}, CreateEmbeddingResponse),
}
"""A body for each endpoint of OpenAI, and the type of its answer."""


class List(BaseModel):
    """A page of a list, as `openai.pagination.SyncCursorPage` reads it."""

    model_config = ConfigDict(extra="forbid")

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Calls:
    """Calls without OpenAI's client, which builds its types without validating them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def get(self, path: str, kind: type[BaseModel]) -> Any:
        """Get a record, which must be of a type."""
        return kind.model_validate_json(self._checked(httpx.get(self._server.url + path, trust_env=False)))

    def post(self, path: str, kind: type[BaseModel], **options: Any) -> Any:
        """Post something; the answer must be of a type."""
        url = self._server.url + path
        return kind.model_validate_json(self._checked(httpx.post(url, trust_env=False, **options)))

    def upload(self, content: bytes, **fields: Any) -> FileObject:
        """Upload a batch file."""
        options = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch", **fields}}
        file: FileObject = self.post("/files", FileObject, **options)
        return file

    def begin(self, file: str, endpoint: str, **fields: Any) -> Batch:
        """Create a batch."""
        body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", **fields}
        batch: Batch = self.post("/batches", Batch, json=body)
        return batch

    def pages(self, path: str, kind: type[BaseModel], limit: int, order: str) -> Iterator[list[str]]:
        """Yield the IDs of each page of a list."""
        after = ""
        while True:
            page = self.get(f"{path}?limit={limit}&order={order}{after}", List)
            ids = [record["id"] for record in page.data]
            for record in page.data:
                kind.model_validate(record)
            assert (page.first_id, page.last_id) == (ids[0], ids[-1])
            yield ids
            if not page.has_more:
                return
            after = f"&after={page.last_id}"

    @staticmethod
    def _checked(answer: httpx.Response) -> bytes:
        assert answer.status_code == 200, answer.text
        return answer.content


def test_each_answer_has_its_type(tmp_path: Path) -> None:
    """Files, batches in each state, lists, deletions, models, results and errors."""
    with serving(tmp_path / "state", *FAST) as server:
        calls = Calls(server)
        (model,) = calls.get("/models", List).data
        assert calls.get(f"/models/{model['id']}", Model).id == "simulated"
        lifetime = {"anchor": "created_at", "seconds": 3600}
        for endpoint, (body, kind) in BODIES.items():
            line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "m", **body}}
            file = calls.upload(
                json.dumps(line).encode()
                + b"\n"
                + json.dumps({**line, "custom_id": "b", "body": {}}).encode(),
                **{f"expires_after[{name}]": value for name, value in lifetime.items()},
            )
            assert file.expires_at == file.created_at + 3600
            created = calls.begin(file.id, endpoint, metadata={"for": "me"}, output_expires_after=lifetime)
            assert (created.status, created.metadata) == ("validating", {"for": "me"})
            server.ended(created)
            batch = calls.get(f"/batches/{created.id}", Batch)
            assert (batch.status, batch.metadata, batch.model) == ("completed", {"for": "me"}, "simulated")
            assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
            output = calls.get(f"/files/{batch.output_file_id}", FileObject)
            assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)
            (answered,) = server.lines_of(batch.output_file_id)
            kind.model_validate(answered["response"]["body"])
            (failed,) = server.lines_of(batch.error_file_id)
            assert set(failed["error"]) == {"code", "message"}
        broken = calls.begin(calls.upload(b"no request").id, "/v1/completions")
        server.ended(broken)
        assert calls.get(f"/batches/{broken.id}", Batch).errors.data[0].code == "invalid_file"
        for path, kind in (("/files", FileObject), ("/batches", Batch)):
            ascending = [*calls.pages(path, kind, 2, "asc")]
            descending = [*calls.pages(path, kind, 3, "desc")]
            assert [len(page) for page in ascending[:-1]] == [2] * (len(ascending) - 1)
            assert [*chain(*ascending)] == [*chain(*descending)][::-1]
        deleted = httpx.delete(f"{server.url}/files/{file.id}", trust_env=False)
        assert FileDeleted.model_validate_json(deleted.content).id == file.id
        missing = httpx.get(f"{server.url}/batches/none", trust_env=False)
        ErrorObject.model_validate(missing.json()["error"])


def test_a_batch_that_is_cancelled_has_its_type(tmp_path: Path) -> None:
    """Also while it is cancelled; its counts add up, and each line is in one of its files."""
    with serving(tmp_path / "state", *SLOW) as server:
        calls = Calls(server)
        batch = calls.begin(calls.upload(requests_of(300)).id, "/v1/chat/completions")
        cancelled = calls.post(f"/batches/{batch.id}/cancel", Batch)
        assert cancelled.status in {"cancelling", "cancelled"}
        server.ended(batch)
        batch = calls.get(f"/batches/{batch.id}", Batch)
        assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
        counts = batch.request_counts
        assert counts is not None
        assert counts.total == counts.completed + counts.failed == 300
