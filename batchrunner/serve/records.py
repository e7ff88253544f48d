"""Looks up files, batches and models, by ID or in pages of a list. Each owner (API key) sees its own."""

from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from batchrunner.serve.api_errors import ApiError, invalid
from batchrunner.serve.owners import Owner, Owners
from batchrunner.serve.state import BATCHES, FILES, Record, State, now

OWNER_OF_CALL: web.RequestKey[Owner] = web.RequestKey("owner", Owner)
"""Key under which a request stores the owner of its API key."""
MODELS = "models"
LARGEST_PAGE = 10_000
"""Maximum number of files or batches in a page, and the default for files."""
DEFAULT_PAGE = {BATCHES: 20}
"""Number of records in a page if the call sets no `limit`; LARGEST_PAGE for other kinds."""
RECORDS_A_CALL = 100
"""A page of a list counts as one call of its owner for each of this many records."""


class Page(BaseModel):
    """Query parameters of a list."""

    limit: int = Field(ge=1, le=LARGEST_PAGE)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class Records:
    """Looks up the files and batches of a server, and its model."""

    def __init__(self, state: State, owners: Owners, model: str) -> None:
        """Look up records in `state`. `model` is the name of the engine's model."""
        self._owners = owners
        self._state = state
        model_record = {"id": model, "object": "model", "created": now(), "owned_by": "batchrunner"}
        self._records: dict[str, dict[str, Record]] = {**state.records, MODELS: {model: model_record}}

    def find(self, kind: str, name: str, owner: Owner) -> Record | None:
        """Return a file or batch; None if this owner has none with this ID."""
        record = self._records[kind].get(name)
        return record if record is not None and (kind == MODELS or owner.may_see(record)) else None

    def one(self, request: web.Request) -> Record:
        """Return the file or batch that a call names; raises ApiError if its owner has none with this ID."""
        kind, name = request.match_info["kind"], request.match_info["id"]
        record = self.find(kind, name, request[OWNER_OF_CALL])
        if record is None:
            raise ApiError(404, f"No such id in {kind}: '{name}'.", "id")
        return record

    async def get(self, request: web.Request) -> Record:
        """Handle a call for one file, batch or model."""
        return request[OWNER_OF_CALL].view(self.one(request))

    async def page(self, request: web.Request) -> Record:
        """Handle a call for a page of the owner's files or batches, by default the newest first."""
        kind, owner = request.match_info["kind"], request[OWNER_OF_CALL]
        page = Page.model_validate({"limit": DEFAULT_PAGE.get(kind, LARGEST_PAGE), **request.query})
        visible = [name for name in self._records[kind] if self.find(kind, name, owner)]
        if page.after:
            visible = self._beyond(page.after, visible, kind, owner, newer=page.order == "asc")
        if page.order == "desc":
            visible.reverse()
        records: list[dict[str, Any]] = [self._records[kind][name] for name in visible]
        matching = [record for record in records if page.purpose in {None, record.get("purpose")}]
        data = [owner.view(record) for record in matching[: page.limit]]
        # A page with many records counts as several calls.
        self._owners.count_call(owner, len(data) / RECORDS_A_CALL)
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(data) < len(matching),
        }

    def _beyond(self, name: str, names: list[str], kind: str, owner: Owner, *, newer: bool) -> list[str]:
        """Return the IDs in `names` that are newer than `name`, or the older ones if `newer` is false.

        `names` is sorted from old to new. `name` may be a file that was deleted after the client read the
        page that lists it. Raises ApiError if the owner has no such file or batch, and did not recently
        delete such a file.
        """
        if name in names:
            index = names.index(name)
            return names[index + 1 :] if newer else names[:index]
        deleted = self._state.deleted_files.get(name) if kind == FILES else None
        if deleted is None or not owner.may_see(deleted):
            raise invalid("after", "no such ID")
        places = self._state.places
        return [other for other in names if (places[other] > places[name]) == newer]
