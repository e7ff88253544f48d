"""Downloads files from public addresses, never from this machine, a private network or cloud metadata."""

import http.client
import socket
import time
import urllib.error
import urllib.request
from functools import cache
from ipaddress import ip_address, ip_network
from urllib.parse import quote

from batchrunner.core.media import BadFileError

TIMEOUT_S = 20.0
"""Longest wait for a connection, or for the next bytes, in seconds."""
PAUSES_S = (0.5, 2.0)
"""Pauses in seconds before the second and the third try, if the server is busy or unreachable."""
_BUSY = {http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS}
_SAFE = "/?%:@!$&'()*+,;=~-._[]|#"
"""Characters of a URL that are not percent-encoded."""
_OF_IPV4 = (ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96"))
"""IPv6 networks whose addresses have an IPv4 address in their last 32 bits."""
_TUNNEL = ip_network("2002::/16")
"""The network of 6to4. Its addresses can lead to any IPv4 address, but Python calls all of them public."""
_HEADERS = {"User-Agent": "batchrunner", "Accept": "image/*, audio/*, video/*, application/pdf, */*;q=0.5"}


def is_public(text: str) -> bool:
    """Tell whether an address is public."""
    address = ip_address(text.partition("%")[0])
    if any(address in network for network in _OF_IPV4):
        address = ip_address(int(address) & 0xFFFFFFFF)
    return address.is_global and not address.is_multicast and address not in _TUNNEL


class _PublicConnection(http.client.HTTPConnection):
    """A connection to a public address."""

    def connect(self) -> None:
        """Connect; raises BadFileError, before anything is sent, for an address that is not public."""
        for *_, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            self._check(address[0])
        super().connect()
        self._check(self.sock.getpeername()[0])  # connecting resolves the name again

    def _check(self, address: str | int) -> None:
        if not is_public(str(address)):
            raise BadFileError(f"is a URL of {self.host}, whose address {address} is not public")


class _PublicSecureConnection(http.client.HTTPSConnection, _PublicConnection):
    """A connection with TLS to a public address. TLS begins after the address has been checked."""


class _PublicHTTP(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens http(s) URLs of public addresses."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request."""
        return self.do_open(_PublicConnection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request with TLS."""
        return self.do_open(_PublicSecureConnection, req)


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that follows redirects to http(s) URLs only, and uses no proxy."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        _PublicHTTP, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def download(url: str, most_bytes: int) -> bytes:
    """Return the bytes at a URL; raises BadFileError, also if there are more than `most_bytes`.

    Blocks, for about a minute if the server does not answer.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            request = urllib.request.Request(quote(url, safe=_SAFE), headers=_HEADERS)  # noqa: S310 - http(s)
            with _opener().open(request, timeout=TIMEOUT_S) as reply:
                content: bytes = reply.read(most_bytes + 1)
                if len(content) > most_bytes:
                    raise BadFileError(f"has more than {most_bytes >> 20} MiB")
                if not reply.length:
                    return content
                failure: Exception = http.client.IncompleteRead(content, reply.length)
                is_busy = True
        except urllib.error.HTTPError as refusal:
            refusal.close()
            failure = refusal
            is_busy = refusal.code in _BUSY or refusal.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
        except (OSError, http.client.HTTPException, ValueError) as caught:
            failure, is_busy = caught, True
        if pause_s is None or not is_busy:
            raise BadFileError(f"cannot be downloaded: {' '.join(str(failure).split())}")
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")
