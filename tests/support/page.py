"""Read report.html as a browser would, and in a browser: headless Chromium, over its DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp

from batchrunner.output.run_dir import RunDir
from batchrunner.output.samples import LoggedSample
from batchrunner.report.html.page import write_page
from tests.conftest import skip_without
from tests.support.server_thread import PATIENCE_S

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\x1b[31m\u202e{{ 7*7 }}"

COUNTS = set(LoggedSample.__struct_fields__) - {"rollouts", "background"}
IDLE = dict.fromkeys(COUNTS, 0) | {
    "event": "sample",
    "task": "generate",
    "stopping": False,
    "simulated": False,
}
"""The fields of a load sample before the first row, but for the schedulers."""


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


def sample(time: float, queue: int = 0, **values: Any) -> dict[str, Any]:
    """Return a sample event; `queue` is that of its one scheduler, and other values are 0."""
    signal = {"scheduler": "s", "running": 8, "queue": queue, "token_usage": 0.5}
    return {**IDLE, "time": time, "signals": [signal], "bands": {"s": [4, 16]}, **values}


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def require_chromium() -> str:
    """Return the program, or skip by name; under CI a missing one fails."""
    found = next(filter(None, map(shutil.which, NAMES)), "")
    skip_without([] if found else ["Chromium (.ci/run installs it)"])
    return found


class Page:
    """A page that is open. Complaints are what its console has of warnings and errors, and exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol and return its result."""
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._replies[number], PATIENCE_S)

    async def open(self, url: str, *, width: int, height: int, dark: bool) -> None:
        """Open a page as on a screen of this size, and wait until it is there."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), PATIENCE_S)

    async def run(self, script: str) -> Any:
        """Return what an expression comes to on the page."""
        reply = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def wait_for(self, script: str) -> Any:
        """Return what an expression comes to on the page, once that is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await self.run(script)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found

    async def point_at(self, x: float, y: float) -> None:
        """Move the pointer to a place on the screen."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self, path: Path, *, height: int | None = None) -> None:
        """Save the page as a PNG: all of it, or its head of so many pixels."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def listen(self) -> None:
        """Take what comes until the browser goes."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                reply = self._replies.pop(told["id"])
                if "error" in told:
                    reply.set_exception(AssertionError(told["error"]["message"]))
                else:
                    reply.set_result(told["result"])
            else:
                self._take_note(told["method"], told["params"])

    def _take_note(self, event: str, params: dict[str, Any]) -> None:
        match event:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])


@contextlib.asynccontextmanager
async def new_page(directory: Path) -> AsyncIterator[Page]:
    """Start Chromium, with its profile in `directory`, and give an empty page; both are gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        require_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*",
        f"--user-data-dir={directory}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        address = await _address(directory / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as response:
                target = next(found for found in await response.json() if found["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                yield page
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def _address(file: Path) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while not (file.exists() and len(lines := file.read_text().splitlines()) > 1):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return f"127.0.0.1:{lines[0]}"
