"""Downloads lead to public addresses only, whatever a URL, a name or a redirect says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batchrunner.input.media import download as module
from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.download import PublicAddresses, download

CONTENT = b"the bytes of an image"


class _Pages(BaseHTTPRequestHandler):
    """A server whose paths say what it answers."""

    asked: list[str]

    def do_GET(self) -> None:
        """Answer as the path says: a status, a redirect, or content."""
        type(self).asked.append(self.path)
        name = self.path.strip("/")
        if name.startswith("to/"):
            self._reply(302, b"", name.removeprefix("to/"))
        elif name == "round":
            self._reply(302, b"", "/round")
        elif name == "busy" and len(type(self).asked) < 3:
            self._reply(503, b"")
        elif name.isdigit():
            self._reply(int(name), b"")
        elif name == "short":
            self._reply(200, CONTENT, length=1000)
        else:
            self._reply(200, CONTENT)

    def _reply(self, status: int, content: bytes, location: str = "", length: int | None = None) -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Loopback(PublicAddresses):
    """Lets this machine count as public, as no test may reach anything else."""

    def allows(self, address: str) -> bool:
        return address == "127.0.0.1" or super().allows(address)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the server."""
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
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


def _refused(url: str, addresses: PublicAddresses, most: int = 1 << 20) -> str:
    with pytest.raises(BadFileError) as failure:
        download(url, most, addresses)
    return str(failure.value)


def test_content(pages: str) -> None:
    """The content comes, also through redirects; a busy server is asked again."""
    assert download(f"{pages}/a?b=c", 1 << 20, _Loopback()) == CONTENT
    assert download(f"{pages}/to//a", 1 << 20, _Loopback()) == CONTENT
    assert download(f"{pages}/Zürich 1%20.png?a=é", 1 << 20, _Loopback()) == CONTENT
    assert _Pages.asked[-1] == "/Z%C3%BCrich%201%20.png?a=%C3%A9"
    _Pages.asked = []
    assert download(f"{pages}/busy", 1 << 20, _Loopback()) == CONTENT
    assert _Pages.asked == ["/busy"] * 3


def test_what_is_no_content(pages: str) -> None:
    """A refusal, too many redirects, too much content and half a reply are said."""
    here = _Loopback()
    assert "the server answers 404" in _refused(f"{pages}/404", here)
    assert "the server answers 500" in _refused(f"{pages}/500", here)
    assert "redirects more than" in _refused(f"{pages}/round", here)
    assert "has more than 0 MiB" in _refused(f"{pages}/a", here, most=10)
    assert "cannot be downloaded" in _refused(f"{pages}/short", here)
    assert "no http(s) URL" in _refused(f"{pages}/to/file:///etc/passwd", here)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254",
        "100.64.0.1", "224.0.0.1", "0x7f.1", "2130706433", "[::1]", "[fe80::1]", "[fc00::1]",
        "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(host: str) -> None:
    """Loopback, private, link-local and the like are refused before anything is connected."""
    assert "is not public" in _refused(f"http://{host}/a.png", PublicAddresses())
    assert "is not public" in _refused(f"https://{host}:8443/a.png", PublicAddresses())


def test_redirect_to_a_private_address(pages: str) -> None:
    """A public server cannot send us to a private one."""
    assert "169.254.169.254 is not public" in _refused(f"{pages}/to/http://169.254.169.254/x", _Loopback())


def test_name_of_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name counts by its addresses: one that is private is enough."""
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 80)) for text in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: addresses)
    assert "10.0.0.1 is not public" in _refused("http://example.org/a.png", PublicAddresses())


def test_no_host() -> None:
    """What is no URL says so."""
    assert "without a host" in _refused("http:///a.png", PublicAddresses())
    assert "no URL" in _refused("http://[::1/a.png", PublicAddresses())
    assert "no URL" in _refused("http://example.org:99999/a.png", PublicAddresses())


@pytest.mark.usefixtures("pages")
def test_nobody_listens() -> None:
    """A server that is not there is said after some tries."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/a"
        assert "cannot be downloaded" in _refused(url, _Loopback())
