"""Proxies on the way to a server: those of the environment, and the time limit of any proxy."""

import ipaddress
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL


class Proxy(NamedTuple):
    """A proxy of the environment."""

    address: URL
    """Its URL, without user and password."""
    auth: aiohttp.BasicAuth | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that send an aiohttp request through the proxy."""
        return {"proxy": self.address, "proxy_auth": self.auth}


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy for a URL, by `http_proxy` or `https_proxy`; None if no proxy applies.

    No proxy applies to servers on the loopback, or with a host, domain or network in `no_proxy`.
    """
    proxies = getproxies()
    with suppress(ValueError, LookupError):  # an invalid URL, or a proxy that aiohttp does not accept
        server = URL(url)
        if server.scheme in proxies and not _is_excluded(server, proxies.get("no", "")):
            return Proxy(*get_env_proxy_for_url(server))
    return None


def by_proxy(url: str) -> str:
    """Return a phrase for messages that names the proxy for a URL; empty if there is no proxy."""
    proxy = proxy_of(url)
    return f" by the proxy {proxy.address} (no_proxy lacks {URL(url).host})" if proxy else ""


def _is_excluded(url: URL, no_proxy: str) -> bool:
    """Tell whether a URL's host is on the loopback, or in `no_proxy`, whose entries may be networks."""
    host = url.host or ""
    if host == "localhost" or proxy_bypass(f"{host}:{url.port}"):  # an entry may have a port
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(address in network for network in _networks_in(no_proxy))


def _networks_in(no_proxy: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return the networks and addresses of `no_proxy`, such as 10.0.0.0/8; skip the names."""
    networks = []
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            networks.append(ipaddress.ip_network(entry.strip(), strict=False))
    return networks


ENDED_BY_PROXY = {408, 502, 504, 524}
"""Statuses by which a proxy ends a request that the engine may still compute."""
LEAST_AGE_S = 5.0
"""A request that ends sooner does not count: its age was not the cause."""
SAME_AGE_S, SAME_SHARE = 1.0, 0.05
"""Largest difference of two ages that count as the same: in seconds, or as a share of the age."""
BETWEEN_S = 1.0
"""Least seconds between two requests that count: requests sent and lost together share one age anyway."""
REQUESTS = 3
"""Requests of the same age that show a limit."""


class ProxyLimit:
    """The time limit of a proxy on the way to one server, learned from its requests. No clock.

    A proxy with a limit answers 504 or 524, or closes the connection, while the engine computes on. All
    requests that it ends have the same age, and no answer takes longer.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        """Age at which the proxy ends requests, in seconds; None while no limit is known."""
        self._ages: deque[float] = deque(maxlen=REQUESTS)
        self._sent_at: deque[float] = deque(maxlen=1)
        self.longest_answer_s = 0.0
        """Largest age of an answered request, in seconds: there is no limit below it."""

    def answered(self, age_s: float) -> None:
        """Record the age of an answered request; an answer past the limit disproves the limit."""
        self.longest_answer_s = max(self.longest_answer_s, age_s)
        if self.limit_s is not None and self._outlived(self.limit_s):
            self.limit_s = None
            self._ages.clear()

    def ended(self, sent_at: float, now: float) -> bool:
        """Record a request that ended without an answer; tell whether it was ended at the limit."""
        age_s = now - sent_at
        if self.limit_s is not None:
            return abs(age_s - self.limit_s) <= _tolerance(self.limit_s)
        if age_s < LEAST_AGE_S or any(sent_at - last < BETWEEN_S for last in self._sent_at):
            return False
        self._sent_at.append(sent_at)
        self._ages.append(age_s)
        shortest, longest = min(self._ages), max(self._ages)
        are_same = longest - shortest <= _tolerance(longest)
        if are_same and len(self._ages) == REQUESTS and not self._outlived(longest):
            self.limit_s = shortest
        return self.limit_s is not None

    def _outlived(self, age_s: float) -> bool:
        """Tell whether an answer took longer than an age."""
        return self.longest_answer_s > age_s + _tolerance(age_s)


def _tolerance(age_s: float) -> float:
    return max(SAME_AGE_S, SAME_SHARE * age_s)
