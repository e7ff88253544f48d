"""The environment's proxies: by which way a server is reached."""

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
        """Arguments with which a request of aiohttp goes by it."""
        return {"proxy": self.address, "proxy_auth": self.auth}


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy for a URL, by `http_proxy` or `https_proxy`; None where none is to be used.

    Directly reached are servers on the loopback, and those whose host, domain or network is in `no_proxy`.
    """
    proxies = getproxies()
    with suppress(ValueError, LookupError):  # a URL that is none, or a proxy that aiohttp does not take
        server = URL(url)
        if server.scheme in proxies and not _is_excluded(server, proxies.get("no", "")):
            return Proxy(*get_env_proxy_for_url(server))
    return None


def by_proxy(url: str) -> str:
    """Return the words for a message that say by which proxy a server is asked; empty where by none."""
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
    """Return the entries that are networks or addresses, such as 10.0.0.0/8; the others are names."""
    networks = []
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            networks.append(ipaddress.ip_network(entry.strip(), strict=False))
    return networks
