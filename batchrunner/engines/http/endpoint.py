"""Where requests are sent, how many are on their way, and whether it takes any."""

from __future__ import annotations

from yarl import URL

from batchrunner.engines.http import wire
from batchrunner.engines.http.deadline import Deadline


class Route:
    """An address with its requests in flight, `timeout_s` long at most."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.paths = {path: URL(url + path) for path in (wire.GENERATE_PATH, wire.CHAT_PATH)}
        self.deadline = Deadline(timeout_s)
        self.in_flight = 0
        self.answers = 0
        """Requests that were answered so far, with whatever status."""
        self.closed: str | None = None
        """Why it takes no rows, where that is so."""

    def close(self, why: str) -> None:
        """Send the rows in flight back unharmed, and take no more until `closed` is None again."""
        self.closed = why
        self.deadline.expire()
