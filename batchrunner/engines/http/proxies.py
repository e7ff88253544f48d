"""Proxies of the environment, and the servers that are reached through them."""

import ipaddress
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
