"""The web page of the server, and a call for data that OpenAI's API lacks.

The page has no data itself, so it needs no API key. It reads `/v1/activity` every few seconds, `/v1/batches`
whenever a batch has changed, and cancels batches by OpenAI's call.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel

from batchrunner.report.html.style import page_style, source_hash
from batchrunner.serve.batches import Batches
from batchrunner.serve.owners import Owner, Owners
from batchrunner.serve.records import OWNER_OF_CALL
from batchrunner.serve.state import BATCHES, OWNER, Record, State

_HERE = Path(__file__).parent


class ActivityQuery(BaseModel):
    """Query parameters of `/v1/activity`."""

    since: float = 0.0
    """Unix time of the newest load sample that the client has."""


class PageApi:
    """Handlers of the page and of `/v1/activity`."""

    def __init__(self, *, state: State, batches: Batches, owners: Owners, endpoints: Sequence[str]) -> None:
        """Show the batches of `state`, their runs, and the engine's load."""
        self._state, self._activity, self._owners = state, batches.activity, owners
        self._server = {
            "model": batches.info.model,
            "simulated": batches.info.simulated,
            "endpoints": [*endpoints],
        }
        self._began = time.time_ns()
        """Time at which the server started. It makes `version` differ after a restart."""
        self._html, self._headers = _page()

    async def page(self, _: web.Request) -> web.Response:
        """Return the page."""
        return web.Response(text=self._html, content_type="text/html", headers=self._headers)

    async def activity(self, request: web.Request) -> Record:
        """Return the owner's running batches, and the load of the engine since the client's last call."""
        owner = request[OWNER_OF_CALL]
        query = ActivityQuery.model_validate(request.query)
        running = self._running(owner)
        changes = self._state.changes
        return {
            "object": "activity",
            **self._server,
            "owner": owner.name or None,
            "time": time.time(),
            # Changes whenever a batch of the owner has changed, and after a restart.
            "version": f"{self._began}-{changes.total() if owner.admin else changes[owner.name]}",
            "waiting": len(self._state.unfinished_batches(None if owner.admin else owner.name))
            - len(running),
            "running": running,
            "load": self._activity.load_since(query.since),
        }

    def _running(self, owner: Owner) -> list[Record]:
        """Return the running batches of an owner, each with the state of its run."""
        running = []
        for name, sample in self._activity.runs.items():
            batch = self._state.records[BATCHES][name]
            if owner.may_see(batch):
                running.append({
                    "batch": owner.view(batch),
                    "time_left_s": sample.time_left_s,
                    "tokens": sample.tokens,
                    "tokens_per_s": sample.output_tokens_per_s + sample.prompt_tokens_per_s,
                    "is_paused": self._owners.account_of(batch.get(OWNER, "")).is_paused,
                })  # fmt: skip
        return running


def _page() -> tuple[str, dict[str, str]]:
    """Return the HTML of the page with its style and script, and its HTTP headers.

    The content security policy allows only this style and this script, and calls of this server. The script
    can set texts, but no HTML.
    """
    html, css, script = (
        (_HERE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    style = page_style() + css
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html.replace("{{ style }}", style).replace("{{ script }}", script), headers
