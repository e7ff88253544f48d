"""Downloads lead to public addresses only, whatever a URL, a name or a redirect says."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batchrunner.core.media import BadFileError
from batchrunner.input.media import download as module
from batchrunner.input.media.download import download, is_public

CONTENT = b"the bytes of an image"


class _Pages(BaseHTTPRequestHandler):
    """A server whose paths say what it answers."""

    asked: list[str]

    def do_GET(self) -> None:
        """Answer as the path says: a status, a redirect, or content."""
        type(self).asked.append(self.path)
        name = self.path.strip("/")
        busy = name == "busy" and len(type(self).asked) < 3
        leads_on = name.startswith(("to/", "round"))
        status = int(name) if name.isdigit() else 302 if leads_on else 503 if busy else 200
        content = CONTENT if status == 200 else b""
        self.send_response(status)
        if status == 302:
            self.send_header("Location", name.removeprefix("to/") if "/" in name else "/round")
        self.send_header("Content-Length", "1000" if name == "short" else str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the server; this machine counts as public, as no test may reach anything else."""
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(module, "is_public", lambda text: text == "127.0.0.1" or is_public(text))
    _Pages.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    server.daemon_threads = False  # its end waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _refused(url: str, most: int = 1 << 20) -> str:
    with pytest.raises(BadFileError) as failure:
        download(url, most)
    return str(failure.value)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/a?b=c", ["/a?b=c"]),
        ("/to//a", ["/to//a", "/a"]),
        ("/Zürich 1%20.png?a=é", ["/Z%C3%BCrich%201%20.png?a=%C3%A9"]),
        ("/busy", ["/busy"] * 3),
    ],
)
def test_content(pages: str, path: str, asked: list[str]) -> None:
    """The content comes, also through redirects; a busy server is asked again."""
    assert download(pages + path, 1 << 20) == CONTENT
    assert _Pages.asked == asked


@pytest.mark.parametrize(
    ("path", "tries", "why"),
    [
        ("/404", 1, "cannot be downloaded: HTTP Error 404"),
        ("/500", 3, "cannot be downloaded: HTTP Error 500"),
        ("/round", 5, "infinite loop"),
        ("/short", 3, "IncompleteRead(21 bytes read, 979 more expected)"),
        ("/to/file:///etc/passwd", 1, "is not allowed"),
        ("/to/http://169.254.169.254/x", 1, "169.254.169.254 is not public"),
    ],
)
def test_what_is_no_content(pages: str, path: str, tries: int, why: str) -> None:
    """A refusal, a redirect to itself or to what is private, and half a reply are said."""
    assert why in _refused(pages + path)
    assert len(_Pages.asked) == tries
    assert "has more than 0 MiB" in _refused(f"{pages}/a", most=10)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254",
        "100.64.0.1", "224.0.0.1", "0x7f.1", "2130706433", "[::1]", "[fe80::1]", "[fc00::1]",
        "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(host: str) -> None:
    """Loopback, private, link-local and the like are refused before anything is connected."""
    assert "is not public" in _refused(f"http://{host}/a.png")
    assert "is not public" in _refused(f"https://{host}:8443/a.png")


def test_a_name_that_leads_elsewhere_by_now(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is connected counts, not what the name meant before."""
    monkeypatch.setattr(module, "is_public", is_public)
    public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80))]
    answers = iter([public, socket.getaddrinfo("127.0.0.1", int(pages.rpartition(":")[2]))])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: next(answers))
    assert "127.0.0.1 is not public" in _refused(f"{pages}/a")
    assert _Pages.asked == []


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("url", ["http:///a.png", "http://[::1/a", "http://a:99999/", "http://127.0.0.1:9/"])
def test_no_server(url: str) -> None:
    """What is no URL, and a server that is not there, are said."""
    assert "cannot be downloaded" in _refused(url)
