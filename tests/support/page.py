"""Read report.html as a browser would."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from batchrunner.output.run_dir import RunDir
from batchrunner.report.html.page import write_page

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\x1b[31m\u202e{{ 7*7 }}"


class Reader(HTMLParser):
    """What a browser makes of a page: its texts, its elements, and what it would run or fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.fetched: list[str] = []
        self._skip = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self._skip += tag in {"script", "style"}
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "data", "action"}]
        self.fetched += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._skip -= tag in {"script", "style"}

    def handle_data(self, data: str) -> None:
        if not self._skip and data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        """All that can be read."""
        return " ".join(self.texts)


def page_of(run: Path) -> Reader:
    """Write and read the page of a run."""
    return Reader(write_page(RunDir(run)).read_text(encoding="utf-8"))


def sample(time: float, **values: Any) -> dict[str, Any]:
    """Return a sample event; `queue` is that of the one scheduler."""
    signal = {"scheduler": "s", "running": 8, "queue": values.pop("queue", 0), "token_usage": 0.5}
    return {"event": "sample", "time": time, "signals": [signal], "bands": {"s": [4, 16]}, **values}
