"""The page of `batchrun serve` in a real browser, and the call that the page reads."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchrunner.serve.batches import request_counts
from batchrunner.serve.batches_api import NULL_FIELDS
from batchrunner.serve.state import FINAL_STATUSES
from tests.conftest import eventually
from tests.e2e.test_batch_files import CHAT, request_of
from tests.e2e.test_page_in_browser import DESKTOP, FAINT, PHONE, TOO_WIDE
from tests.e2e.test_serve import FAST, SLOW, Server, requests_of, serving
from tests.e2e.test_serve_owners import KEYS, client_of, write_keys
from tests.support.page import HOSTILE, Page, new_page

SHOWN = 'document.querySelector("main")?.hidden === false'
ASKED = 'document.querySelector("#login")?.hidden === false'
TEXT = "document.body.innerText"
RIGHT_TO_LEFT = "\u202e\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd" + "w" * 400


def address_of(server: Server) -> str:
    """Return the address of the page."""
    return server.url.removesuffix("v1")


def activity_of(server: Server, name: str, **query: Any) -> dict[str, Any]:
    """Return the activity that an owner sees."""
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    reply = httpx.get(f"{server.url}/activity", params=query, headers=headers, trust_env=False)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@contextlib.asynccontextmanager
async def page_of(
    server: Server, directory: Path, name: str = "", *, size: tuple[int, int] = DESKTOP, dark: bool = False
) -> AsyncIterator[Page]:
    """Open the page in a browser whose profile is in `directory`, and enter the key of an owner."""
    async with new_page(directory) as page:
        await page.open(address_of(server), width=size[0], height=size[1], dark=dark)
        if name:
            await page.wait_for(ASKED)
            await enter(page, KEYS[name])
            await page.wait_for(SHOWN)
        yield page


async def enter(page: Page, key: str) -> None:
    """Type a key and press Enter."""
    await page.run('document.querySelector("#key").focus()')
    await page.call("Input.insertText", text=key)
    for kind in ("keyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                        windowsVirtualKeyCode=13)  # fmt: skip


def complaints_of(page: Page, *expected: str) -> list[str]:
    """Return the complaints of a console, except `expected` ones, and that the first call had no key."""
    return [text for text in page.complaints if not any(part in text for part in ("401", *expected))]


def assert_only_from(server: Server, page: Page) -> None:
    """Fail if a page requested anything from another host."""
    assert [url for url in page.requested if not url.startswith((address_of(server), "data:,"))] == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A slow server with three owners. Anna and Ben have each a batch that runs, the admin has none."""
    directory = tmp_path_factory.mktemp("serve")
    keys = write_keys(directory / "keys.yaml")
    with serving(directory / "state", "--keys", keys, *SLOW) as server:
        for name in ("anna", "ben"):
            client = client_of(server, name)
            file = client.upload(requests_of(5000, max_tokens=60))
            client.batches.create(
                input_file_id=file, endpoint=CHAT, completion_window="24h", metadata={"by": name}
            )
        eventually(lambda: len(activity_of(server, "root")["running"]) == 2)
        yield server


def test_owners_see_their_own_activity(shared: Server) -> None:
    """Owners see only their runs, an admin all with owners; a point of the load comes once."""
    anna, root = activity_of(shared, "anna"), activity_of(shared, "root")
    (run,) = anna["running"]
    assert (anna["owner"], run["batch"]["metadata"], "owner" in run["batch"]) == (
        "anna",
        {"by": "anna"},
        False,
    )
    assert {run["batch"]["owner"] for run in root["running"]} == {"anna", "ben"}
    assert {"time_left_s", "tokens", "tokens_per_s", "is_paused"} < run.keys()
    assert anna["endpoints"][0] == CHAT
    assert len({len(column) for column in anna["load"].values()}) == 1
    newest = anna["load"]["time"][-1]
    assert newest not in activity_of(shared, "anna", since=newest)["load"]["time"]
    for query in ({"since": "x"}, {"since": ""}):
        reply = httpx.get(f"{shared.url}/activity", params=query, trust_env=False,
                          headers={"Authorization": f"Bearer {KEYS['anna']}"})  # fmt: skip
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "since")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(f"{shared.url}/activity", headers=headers, trust_env=False).status_code == 401


def test_the_version_follows_changes_of_batches(tmp_path: Path) -> None:
    """It differs for whoever sees the changed batch, and for nobody else; after a restart for all."""
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--keys", keys, *FAST) as server:

        def versions() -> dict[str, str]:
            return {name: activity_of(server, name)["version"] for name in KEYS}

        before = versions()
        anna = client_of(server, "anna")
        anna.ended(anna.begin(requests_of(3)))
        after = versions()
        assert {name for name in KEYS if before[name] != after[name]} == {"anna", "root"}
        assert versions() == after
        server.kill()
        server.start()
        assert not {*versions().values()} & {*after.values()}


def test_the_page_has_no_data(shared: Server) -> None:
    """The page needs no key, is the same for all, names no batch, and allows nothing but its own script."""
    reply = httpx.get(address_of(shared), trust_env=False)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    html = reply.text.partition("<script>")[0]
    for word in ("batch_", "anna", "5,000", "by:", "//"):
        assert word not in html
    policy = reply.headers["content-security-policy"]
    assert "unsafe" not in policy
    for part in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "form-action 'none'"):
        assert part in policy
    for unsafe in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Storage",
        "cookie",
    ):
        assert unsafe not in reply.text


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_running_batches(shared: Server, tmp_path: Path, size: tuple[int, int], *, dark: bool) -> None:
    """The page shows progress, time left, tokens and the load, and no batch of another owner."""
    async with page_of(shared, tmp_path / "profile", "anna", size=size, dark=dark) as page:
        assert "by: ben" not in await page.run(TEXT)
        await page.wait_for('document.querySelector("#running .ok").getBoundingClientRect().width > 0')
        figures = await page.wait_for(
            '(document.querySelector("#running .figures").innerText.match('
            "/([\\d,]+) of 5,000 requests.* left.* tokens.* tokens.s/) ?? [])[1]"
        )
        await page.wait_for(
            f'!document.querySelector("#running .figures").innerText.includes("{figures} of")'
        )
        assert "by: anna" in await page.run('document.querySelector("#running").innerText')
        assert await page.run('document.querySelectorAll("#load path.line[d^=M]").length') == 5
        assert await page.run(TOO_WIDE) == []
        assert await page.run("document.documentElement.scrollWidth") <= size[0]
        assert await page.run(FAINT) == []
        assert await page.run('matchMedia("(prefers-color-scheme: dark)").matches') == dark
        left, middle = await page.run(
            'document.querySelector(".plot").scrollIntoView({block: "center"}),'
            "(({x, y, height}) => [x, y + height / 2])"
            '(document.querySelector(".plot").getBoundingClientRect())'
        )
        await page.point_at(left + 1, middle)
        assert "ago" in await page.run('document.querySelector("#load .hint").innerText')
        assert complaints_of(page) == []
        assert_only_from(shared, page)
        await page.picture(tmp_path / "page.png")


@pytest.mark.browser
async def test_an_admin_sees_all_owners(shared: Server, tmp_path: Path) -> None:
    """The names of the owners stand beside their batches; after the key is forgotten nothing is left."""
    async with page_of(shared, tmp_path / "profile", "root") as page:
        names = '[...document.querySelectorAll(".owner")].map((name) => name.innerText)'
        assert await page.run(names) == ["anna", "ben"]
        await page.run('document.querySelector("#forget").click()')
        assert "anna" not in await page.run("document.documentElement.textContent")
        await enter(page, KEYS["ben"])
        await page.wait_for(SHOWN)
        assert await page.run(names) == [""]
        assert "by: ben" in await page.run(TEXT)
        assert "by: anna" not in await page.run(TEXT)


@pytest.mark.browser
async def test_the_key_is_only_in_memory(shared: Server, tmp_path: Path) -> None:
    """A wrong key is one line; a right one is in no storage, address or file, and a reload forgets it."""
    async with page_of(shared, tmp_path / "profile") as page:
        await page.wait_for(ASKED)
        refusal = 'document.querySelector("#refusal").innerText'
        assert await page.run(refusal) == ""
        for wrong in ("sk-wrong", "ключ", "sk-\u00e4"):
            await enter(page, wrong)
            assert await page.wait_for(refusal) == "This key is not valid."
            assert await page.run('document.querySelector("main").hidden')
            await page.run('document.querySelector("#refusal").textContent = ""')
        await enter(page, KEYS["anna"])
        await page.wait_for(SHOWN)
        storage = "[localStorage.length, sessionStorage.length, document.cookie, location.href, name]"
        assert await page.run(storage) == [0, 0, "", address_of(shared), ""]
        assert (await page.call("Storage.getCookies"))["cookies"] == []
        assert KEYS["anna"] not in await page.run("document.documentElement.outerHTML")
        assert await page.run('document.querySelector("#key").value') == ""
        assert not [url for url in page.requested if "sk-" in url]
        assert complaints_of(page) == []
        await page.call("Page.reload")
        await page.wait_for(ASKED)
        assert await page.run('document.querySelector("main").hidden')
        with contextlib.suppress(AssertionError, TimeoutError, ConnectionError):
            await page.call("Browser.close")
    key = KEYS["anna"].encode()
    files = [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert [path for path in files if key in path.read_bytes()] == []


@pytest.mark.browser
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_hostile_texts(tmp_path: Path, size: tuple[int, int]) -> None:
    """Metadata, names of files, IDs of lines and errors are shown as texts, and nothing of them runs."""
    with serving(tmp_path / "state", *FAST) as server:
        name = HOSTILE.replace("\x00", "").replace("\x1b", "")
        line = json.dumps({**request_of(1, max_tokens=-5), "custom_id": HOSTILE}).encode() + b"\n"
        for content in (line + requests_of(1), line * 2, b"{\n"):
            file = server.client.files.create(file=(f"{name}.jsonl", content), purpose="batch").id
            batch = server.client.batches.create(
                input_file_id=file, endpoint=CHAT, completion_window="24h",
                metadata={HOSTILE[:64]: HOSTILE, "long": "w" * 512, RIGHT_TO_LEFT[:64]: RIGHT_TO_LEFT},
            )  # fmt: skip
            server.ended(batch)
        async with page_of(server, tmp_path / "profile", size=size) as page:
            await page.wait_for(SHOWN)
            assert await page.run('document.querySelectorAll(".batch").length') == 3
            await page.run('document.querySelectorAll("summary").forEach((one) => one.click())')
            shown = await page.wait_for(
                f'(document.querySelector("#all").textContent.match(/Failed: .script/)) && {TEXT}'
            )
            for text in ("<img src=x onerror=alert(1)>", "{{ 7*7 }}", "max_tokens: should be"):
                assert text in shown
            assert await page.wait_for(f"{TEXT}.includes({json.dumps(name[:20])})")
            assert (
                await page.run('document.querySelectorAll("img, iframe, a, body script + script").length')
                == 0
            )
            assert await page.run(TOO_WIDE) == []
            assert await page.run("document.documentElement.scrollWidth") <= size[0]
            assert await page.run(FAINT) == []
            await page.picture(tmp_path / "page.png")
            assert complaints_of(page) == []
            assert_only_from(server, page)


@pytest.mark.browser
@pytest.mark.parametrize("name", ["", "anna", "root"])
async def test_cancel(tmp_path: Path, name: str) -> None:
    """The button asks, then cancels by the API; without a key too, and an admin cancels others' batches."""
    options = ["--keys", write_keys(tmp_path / "keys.yaml")] if name else []
    with serving(tmp_path / "state", *options, *SLOW) as server:
        client = client_of(server, "anna", "" if name else "none")
        batch = client.begin(requests_of(5000, max_tokens=20))
        async with page_of(server, tmp_path / "profile", name) as page:
            await page.wait_for(SHOWN)
            button = 'document.querySelector(".cancel")'
            await page.wait_for(f"{button} && !{button}.hidden")
            await page.run(f"{button}.click()")
            assert await page.run(f"{button}.innerText") == "Cancel this batch?"
            assert client.batches.retrieve(batch.id).status in {"validating", "in_progress"}
            await page.run(f"{button}.click()")
            await page.wait_for(f'{TEXT}.includes("cancelled")')
            assert await page.run(f"{button}.hidden")
            assert complaints_of(page) == []
        assert client.batches.retrieve(batch.id).status == "cancelled"


@pytest.mark.browser
async def test_the_server_restarts(tmp_path: Path) -> None:
    """The page says that the server is away, and goes on by itself; no token of the batch is lost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = write_keys(tmp_path / "keys.yaml")
    with serving(tmp_path / "state", "--keys", keys, "--port", port, *SLOW) as server:
        client_of(server, "anna").begin(requests_of(5000, max_tokens=20))
        async with page_of(server, tmp_path / "profile", "anna") as page:
            eventually(lambda: sum(run["tokens"] for run in activity_of(server, "anna")["running"]))
            server.kill(signal.SIGTERM)
            usage = json.loads((server.directory / "usage.json").read_text())["tokens"]["anna"]
            notice = 'document.querySelector("#notice").innerText'
            assert (
                await page.wait_for(notice) == "The server does not answer. This page tries again by itself."
            )
            assert await page.run(SHOWN)
            server.start()
            await page.wait_for(f"!({notice})")
            eventually(lambda: bool(activity_of(server, "anna")["running"]))
            (run,) = activity_of(server, "anna")["running"]
            assert run["tokens"] >= usage > 0
            assert await page.wait_for('document.querySelectorAll("#running .batch").length') == 1
            assert complaints_of(page, "ERR_CONNECTION") == []


@pytest.mark.browser
async def test_waiting_and_paused_batches(tmp_path: Path) -> None:
    """The page says which batches wait for their turn, and which pause because all tokens are used up."""
    keys = write_keys(tmp_path / "keys.yaml", anna={"max_tokens_per_day": 300})
    with serving(tmp_path / "state", "--keys", keys, *SLOW) as server:
        anna = client_of(server, "anna")
        file = anna.upload(requests_of(100, max_tokens=20))
        for _ in range(5):
            anna.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        async with page_of(server, tmp_path / "profile", "anna") as page:
            await page.wait_for('document.querySelectorAll("#running .batch").length === 3')
            await page.wait_for('document.querySelector("#running").innerText.match(/paused/g)?.length === 3')
            await page.wait_for('document.querySelector("#all").innerText.match(/waits for/g)?.length === 2')
            await page.wait_for('document.querySelector("#tiles").innerText.includes("2 waiting")')
            assert complaints_of(page) == []


COUNT_POLLS = """
    const polls = {begun: 0, ended: 0}, realFetch = window.fetch
    window.fetch = async (...call) => {
        polls.begun += 1
        try { return await realFetch(...call) } finally { polls.ended += 1 }
    }
"""
"""Counts the calls of the page that began and that ended."""


@pytest.mark.browser
async def test_ten_thousand_batches(tmp_path: Path) -> None:
    """The page lists the newest hundred, and a hundred more at each click; a hidden page asks nothing."""
    count, ids = 10_000, []
    (tmp_path / "state" / "batches").mkdir(parents=True)
    for number in range(count):
        batch = {
            **dict.fromkeys(NULL_FIELDS), "id": f"batch_{number:048x}", "object": "batch", "endpoint": CHAT,
            "status": sorted(FINAL_STATUSES)[number % 4], "model": "simulated", "input_file_id": "file-x",
            "created_at": int(time.time()) - count + number, "expires_at": int(time.time()) + 86_400,
            "completion_window": "24h", "metadata": {"number": str(number)}, "output_expires_after": None,
            "request_counts": request_counts(total=9, completed=7, failed=2), "owner": "",
        }  # fmt: skip
        ids.append(batch["id"])
        (tmp_path / "state" / "batches" / f"{batch['id']}.json").write_text(json.dumps(batch))
    with serving(tmp_path / "state", *FAST) as server:
        async with page_of(server, tmp_path / "profile") as page:
            await page.wait_for(SHOWN)
            names = '[...document.querySelectorAll(".batch .name")].map((name) => name.innerText)'
            assert await page.run(names) == [f"number: {number}" for number in range(9999, 9899, -1)]
            await page.run("const real = setTimeout; setTimeout = (act, ms) => real(act, ms / 100)")
            for shown in (200, 300):
                await page.run('document.querySelector("#more").click()')
                await page.wait_for(f"{names}.length === {shown}")
            assert (await page.run(names))[-1] == "number: 9700"
            await page.run(COUNT_POLLS)
            await page.wait_for("polls.begun >= 3")
            lists = [url for url in page.requested if "/v1/batches" in url]
            # A list is read when a batch has changed or more are wanted, not at each poll.
            assert len(lists) == 3
            hide = 'Object.defineProperty(document, "visibilityState", {{value: "{}", configurable: true}}),'
            event = 'document.dispatchEvent(new Event("visibilitychange"))'
            await page.run(hide.format("hidden") + event)
            await page.wait_for("polls.begun === polls.ended")
            polls = await page.run("polls.begun")
            # The page's own clock passes the time of 25 polls.
            await page.run("let ticks = 0; const tick = () => { ticks += 1; setTimeout(tick, 2000) }; tick()")
            await page.wait_for("ticks > 25")
            assert await page.run("polls.begun") == polls
            await page.run(hide.format("visible") + event)
            await page.wait_for(f"polls.begun > {polls}")
            assert complaints_of(page) == []


@pytest.mark.browser
async def test_no_batches_yet(tmp_path: Path) -> None:
    """The page says how to start a batch, and what it says works as it stands; the batch then appears."""
    with serving(tmp_path / "state", *FAST) as server:
        async with page_of(server, tmp_path / "profile") as page:
            await page.wait_for(SHOWN)
            assert await page.run('!document.querySelector("#empty").hidden')
            await page.run('document.querySelector("#copy").click()')
            program = await page.run("getSelection().toString()")
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            await page.wait_for('document.querySelectorAll("#all .batch").length === 1')
            await page.wait_for('document.querySelector(".state").innerText === "completed"')
            assert await page.run('document.querySelector("#empty").hidden')
            assert complaints_of(page) == []
