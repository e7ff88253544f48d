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
"""Maximum wait in seconds for a connection, and for the next bytes of a file."""
PAUSES_S = (0.5, 2.0)
"""Pauses in seconds before the second and the third attempt, if the server is busy or unreachable."""
_BUSY = {http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS}
"""HTTP statuses below 500 after which a request may be retried."""
_SAFE = "/?%:@!$&'()*+,;=~-._[]|#"
"""Characters of a URL that are not percent-encoded."""
_OF_IPV4 = (ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96"))
"""IPv6 networks whose addresses contain an IPv4 address in the last 32 bits."""
_TUNNEL = ip_network("2002::/16")
"""Network of 6to4 addresses. They can lead to any IPv4 address, although Python calls them public."""
_HEADERS = {"User-Agent": "batchrunner", "Accept": "image/*, audio/*, video/*, application/pdf, */*;q=0.5"}


def is_public(text: str) -> bool:
    """Tell whether an IP address is public: not this machine, not a private network, not link-local."""
    # Cut off the zone of an IPv6 address, such as %eth0 in fe80::1%eth0.
    address = ip_address(text.partition("%")[0])
    if any(address in network for network in _OF_IPV4):
        # The IPv6 address stands for the IPv4 address in its last 32 bits.
        address = ip_address(int(address) & 0xFFFFFFFF)
    return address.is_global and not address.is_multicast and address not in _TUNNEL


class _PublicConnection(http.client.HTTPConnection):
    """HTTP connection that only opens to a public address."""

    def connect(self) -> None:
        """Connect; raise BadFileError, before anything is sent, if the address is not public."""
        for *_, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            self._check(address[0])
        super().connect()
        # Connecting resolves the name again, which may give another address than the lookup above.
        self._check(self.sock.getpeername()[0])

    def _check(self, address: str | int) -> None:
        if not is_public(str(address)):
            raise BadFileError(f"is a URL of {self.host}, whose address {address} is not public")


class _PublicSecureConnection(http.client.HTTPSConnection, _PublicConnection):
    """HTTPS connection that only opens to a public address. TLS begins after the check of the address."""


class _PublicHTTP(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Handler that opens http(s) URLs of public addresses only."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request over HTTP if the address is public."""
        return self.do_open(_PublicConnection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request over HTTPS if the address is public."""
        return self.do_open(_PublicSecureConnection, req)


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Return a URL opener that uses no proxy, and follows redirects only to http(s) URLs."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        _PublicHTTP, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def download(url: str, most_bytes: int) -> bytes:
    """Return the bytes at a URL; raise BadFileError if they cannot be downloaded or exceed `most_bytes`.

    This blocks, for up to about a minute if the server does not answer.
    """
    for pause_s in (*PAUSES_S, None):
        # None marks the last attempt, after which there is no pause.
        try:
            request = urllib.request.Request(quote(url, safe=_SAFE), headers=_HEADERS)  # noqa: S310 - http(s)
            with _opener().open(request, timeout=TIMEOUT_S) as reply:
                content: bytes = reply.read(most_bytes + 1)
                if len(content) > most_bytes:
                    # No `except` below catches this error, so a file that is too large is not fetched again.
                    raise BadFileError(f"has more than {most_bytes >> 20} MiB")
                # `length` is the number of announced bytes that have not arrived.
                missing_bytes = reply.length
                if not missing_bytes:
                    return content
                failure: Exception = http.client.IncompleteRead(content, missing_bytes)
                may_succeed_later = True
        except urllib.error.HTTPError as refusal:
            refusal.close()
            failure = refusal
            is_server_error = refusal.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
            may_succeed_later = refusal.code in _BUSY or is_server_error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Most of these are errors of the network. The rest, such as a bad URL in a redirect (ValueError),
            # are rare, so they are retried too.
            failure, may_succeed_later = error, True
        if pause_s is None or not may_succeed_later:
            raise BadFileError(f"cannot be downloaded: {' '.join(str(failure).split())}")
        time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")
