"""Downloads a file from a public address: not from this machine, a private network or a cloud's metadata.

The address that is connected to is the one that was checked, for the first URL and for each that it redirects
to. So no name can lead to another address than it had when it was looked up.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from urllib.parse import quote, urljoin, urlsplit

from batchrunner.input.media.bad_file import BadFileError

MOST_REDIRECTS = 5
TIMEOUT_S = 20.0
"""Longest wait for a connection, and for the next bytes, in seconds."""
PAUSES_S = (0.5, 2.0)
"""Pauses before another try where the server is busy or not reached, in seconds."""
_PIECE_BYTES = 1 << 20
_SAFE = "/?%:@!$&'()*+,;=~-._[]|"
"""Characters of a path and its query that stay as they are."""
_REDIRECTS = {
    HTTPStatus.MOVED_PERMANENTLY,
    HTTPStatus.FOUND,
    HTTPStatus.SEE_OTHER,
    HTTPStatus.TEMPORARY_REDIRECT,
    HTTPStatus.PERMANENT_REDIRECT,
}
_BUSY = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_HEADERS = {"User-Agent": "batchrunner", "Accept": "image/*, audio/*, video/*, application/pdf, */*;q=0.5"}


class BusyServerError(Exception):
    """The server may answer later."""


class PublicAddresses:
    """Looks up hosts, and refuses addresses that are not public."""

    def of(self, host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        """Return the addresses of a host, all of them public; raises BadFileError or OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for _, _, _, _, address in found:
            if not self.allows(str(address[0])):
                raise BadFileError(f"is a URL of {host}, whose address {address[0]} is not public")
        return [(family, str(address[0])) for family, _, _, _, address in found]

    def allows(self, address: str) -> bool:
        """Tell whether an address is public."""
        return all(each.is_global and not each.is_multicast for each in _with_inner(address))


def _with_inner(text: str) -> Iterator[_IPAddress]:
    """Yield an address, and those of IPv4 that it stands for."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    known = [each for each in inner if each is not None]
    if address.ipv4_mapped is None:
        yield address
    yield from known


def download(url: str, most_bytes: int, addresses: PublicAddresses | None = None) -> bytes:
    """Return the bytes at a URL; raises BadFileError. Blocks, for a slow server up to a minute."""
    checked = addresses or PublicAddresses()
    for pause_s in (*PAUSES_S, None):
        try:
            return _followed(url, most_bytes, checked)
        except (OSError, http.client.HTTPException, BusyServerError) as failure:
            if pause_s is None:
                why = " ".join(str(failure).split()) or type(failure).__name__
                raise BadFileError(f"cannot be downloaded: {why}") from None
        except ValueError as failure:
            raise BadFileError(f"is no URL that can be downloaded: {failure}") from None
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _followed(url: str, most_bytes: int, addresses: PublicAddresses) -> bytes:
    for _ in range(MOST_REDIRECTS + 1):
        with closing(_connection(url, addresses)) as connection:
            parts = urlsplit(url)
            path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
            connection.request("GET", path, headers=_HEADERS)
            with closing(connection.getresponse()) as reply:
                if reply.status not in _REDIRECTS:
                    return _body(reply, most_bytes)
                url = urljoin(url, reply.headers.get("Location", ""))
        if urlsplit(url).scheme not in {"http", "https"}:
            raise BadFileError("redirects to something that is no http(s) URL")
    raise BadFileError(f"redirects more than {MOST_REDIRECTS} times")


def _body(reply: http.client.HTTPResponse, most_bytes: int) -> bytes:
    if reply.status in _BUSY or reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise BusyServerError(f"the server answers {reply.status}")
    if reply.status != HTTPStatus.OK:
        raise BadFileError(f"cannot be downloaded: the server answers {reply.status}")
    pieces: list[bytes] = []
    size = 0
    while piece := reply.read(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise BadFileError(f"has more than {most_bytes >> 20} MiB")
    if reply.length:  # what is still to come
        raise BusyServerError("the connection ended early")
    return b"".join(pieces)


def _connection(url: str, addresses: PublicAddresses) -> http.client.HTTPConnection:
    """Connect to the address of a URL that was checked."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise BadFileError("is a URL without a host")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    family, address = addresses.of(parts.hostname, port)[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.settimeout(TIMEOUT_S)
        made.connect((address, port))
        if secure:
            made = ssl.create_default_context().wrap_socket(made, server_hostname=parts.hostname)
    except BaseException:
        made.close()
        raise
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
    connection.sock = made
    return connection
