"""Handlers of the calls of OpenAI's Batches API that create and cancel batches."""

import json
import math
from collections.abc import Sequence
from typing import Annotated

from aiohttp import web
from pydantic import Field

from batchrunner.job.fields import Duration
from batchrunner.serve.api_errors import ApiError, invalid
from batchrunner.serve.batches import Batches, request_counts
from batchrunner.serve.files_api import ExpiresAfter, FilesApi, Parameters
from batchrunner.serve.owners import Owners
from batchrunner.serve.records import OWNER_OF_CALL, Records
from batchrunner.serve.state import FILES, OWNER, Record, State, new_id, now

NULL_FIELDS = (
    "errors", "output_file_id", "error_file_id", "usage", "in_progress_at", "finalizing_at", "completed_at",
    "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
"""Fields of a new batch that are null."""


class NewBatch(Parameters):
    """The body of a call that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[Duration, Field(ge=1, le=366 * 86400)]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchesApi:
    """Handlers of the calls that change batches."""

    def __init__(
        self,
        *,
        state: State,
        batches: Batches,
        owners: Owners,
        records: Records,
        files: FilesApi,
        endpoints: Sequence[str],
    ) -> None:
        self._state, self._batches, self._owners = state, batches, owners
        self._records, self._files, self._endpoints = records, files, endpoints

    async def create(self, request: web.Request) -> Record:
        """Start a batch. It is stored on the disk before the client gets the reply."""
        owner = request[OWNER_OF_CALL]
        body = await request.read()
        new_batch = NewBatch.model_validate_json(body)
        if new_batch.endpoint not in self._endpoints:
            raise invalid("endpoint", f"supported are {', '.join(self._endpoints)}")
        file = self._records.find(FILES, new_batch.input_file_id, owner) or {}
        no_input = invalid("input_file_id", "no such file with the purpose 'batch'")
        if file.get("purpose") != "batch":
            raise no_input
        batch: Record = {
            **dict.fromkeys(NULL_FIELDS),
            **new_batch.model_dump(),
            "id": new_id("batch_"),
            "object": "batch",
            "status": "validating",
            "model": self._batches.info.model,
            "created_at": now(),
            "expires_at": now() + math.ceil(new_batch.completion_window),
            # As the client wrote it. OpenAI's clients expect a text, so a number of seconds becomes one.
            "completion_window": str(json.loads(body)["completion_window"]),
            "request_counts": request_counts(total=0),
            OWNER: owner.name,
        }

        # `add_batch` calls this while no other batch can be added, so parallel calls cannot exceed the
        # limits.
        def check_limits() -> None:
            self._files.check_count(owner)
            self._owners.check_limits(owner, self._state.unfinished_batches(owner.name))

        if not await self._state.add_batch(batch, check_limits):
            raise no_input
        self._batches.start(batch)
        return owner.view(batch)

    async def cancel(self, request: web.Request) -> Record:
        """Cancel a batch that has not ended."""
        batch = self._records.one(request)
        if batch["status"] in {"validating", "in_progress"}:
            await self._batches.cancel(batch)
        # A batch that is already being cancelled is returned unchanged.
        if batch["status"] != "cancelling":
            raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.")
        return request[OWNER_OF_CALL].view(batch)
