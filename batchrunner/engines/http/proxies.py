"""Proxies between this machine and a server: proxies in the environment, and time limits of proxies."""

import ipaddress
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL


class Proxy(NamedTuple):
    """A proxy that an environment variable names."""

    address: URL
    """URL of the proxy, without user and password."""
    auth: aiohttp.BasicAuth | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that send an aiohttp request through the proxy."""
        return {"proxy": self.address, "proxy_auth": self.auth}


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy that `http_proxy` or `https_proxy` names for a URL; None if no proxy applies.

    No proxy applies to a loopback address, or to a host, domain or network in `no_proxy`.
    """
    proxies = getproxies()
    # The URL may be invalid, or the proxy may be one that aiohttp does not accept.
    with suppress(ValueError, LookupError):
        server = URL(url)
        if server.scheme in proxies and not _is_excluded(server, proxies.get("no", "")):
            return Proxy(*get_env_proxy_for_url(server))
    return None


def by_proxy(url: str) -> str:
    """Return a phrase for messages, such as " by the proxy …", if a proxy applies to a URL; else ""."""
    proxy = proxy_of(url)
    return f" by the proxy {proxy.address} (no_proxy lacks {URL(url).host})" if proxy else ""


def _is_excluded(url: URL, no_proxy: str) -> bool:
    """Tell whether no proxy applies to a URL: its host is a loopback address, or is in `no_proxy`."""
    host = url.host or ""
    # The port is passed too, because an entry of `no_proxy` may name a port.
    if host == "localhost" or proxy_bypass(f"{host}:{url.port}"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(address in network for network in _networks_in(no_proxy))


def _networks_in(no_proxy: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return the networks and addresses in `no_proxy`, such as 10.0.0.0/8; host names are left out."""
    networks = []
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            networks.append(ipaddress.ip_network(entry.strip(), strict=False))
    return networks


ENDED_BY_PROXY = {408, 502, 504, 524}
"""HTTP statuses with which a proxy ends a request that the server may still compute."""
LEAST_AGE_S = 5.0
"""Requests that ended at a lower age in seconds are ignored: they were too young for the time limit of a
proxy."""
SAME_AGE_S = 1.0
"""Two requests count as equally old if their ages differ by at most this many seconds."""
SAME_SHARE = 0.05
"""Two requests also count as equally old if their ages differ by at most this fraction."""
BETWEEN_S = 1.0
"""Of lost requests that were sent within this many seconds of each other, only the first one is evidence of a
time limit. If a server fails, requests that were sent together have the same age, whatever the cause."""
REQUESTS = 3
"""Number of requests that must end at the same age before this age counts as the time limit of a proxy."""


class ProxyLimit:
    """Time limit of a proxy between this machine and one server, learned from ended requests.

    When the limit is reached, a proxy answers 504 or 524, or closes the connection, while the server computes
    on. So all requests that the proxy ends have the same age, and no answer takes longer. The caller passes
    all times.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        """Age in seconds at which the proxy ends requests; None while no limit is known."""
        self._ages: deque[float] = deque(maxlen=REQUESTS)
        """Ages in seconds of the last requests that counted."""
        self._last_sent_at: float | None = None
        """Time at which the last request that counted was sent."""
        self.longest_answer_s = 0.0
        """Largest age in seconds of an answered request. The limit of a proxy cannot be lower."""

    def answered(self, age_s: float) -> None:
        """Record the age of an answered request; drop an assumed time limit that is shorter."""
        self.longest_answer_s = max(self.longest_answer_s, age_s)
        if self.limit_s is not None and self._outlived(self.limit_s):
            self.limit_s = None
            self._ages.clear()

    def ended(self, sent_at: float, now: float) -> bool:
        """Record a request that ended without an answer; tell whether a proxy's time limit ended it."""
        age_s = now - sent_at
        if self.limit_s is not None:
            return abs(age_s - self.limit_s) <= _tolerance(self.limit_s)
        if age_s < LEAST_AGE_S:
            # The request was too young for the time limit of a proxy.
            return False
        # If a server fails, requests that were sent together end together. So only the first of them counts.
        if self._last_sent_at is not None and sent_at - self._last_sent_at < BETWEEN_S:
            return False
        self._last_sent_at = sent_at
        self._ages.append(age_s)
        shortest, longest = min(self._ages), max(self._ages)
        # A time limit ends all requests at the same age, and no answer arrives at a higher age.
        are_equal = longest - shortest <= _tolerance(longest)
        if are_equal and len(self._ages) == REQUESTS and not self._outlived(shortest):
            self.limit_s = shortest
        return self.limit_s is not None

    def _outlived(self, age_s: float) -> bool:
        return self.longest_answer_s > age_s + _tolerance(age_s)


def _tolerance(age_s: float) -> float:
    """Return the largest difference in seconds between ages that count as equal."""
    return max(SAME_AGE_S, SAME_SHARE * age_s)
