"""The real Model Gateway, `smg`, in a process of its own."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from batchrunner.engines.http.connections import free_port
from tests.conftest import eventually
from tests.support.fake_sglang import FakeSGLang

KEY_VARIABLE = "SGLANG_API_KEY"


class RealGateway:
    """The real gateway in a process of its own, with whatever workers a test gives it."""

    def __init__(self, *arguments: str, key: str | None = None) -> None:
        self.key = key or secrets.token_hex(8)
        self.url = f"http://127.0.0.1:{free_port()}"
        self._arguments = arguments
        self.reads_requests = "cache_aware" in arguments
        """Whether its policy needs the prompts, so that it writes requests anew."""
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"})
        self.process = self._start()
        eventually(self._is_up, 60)

    def _start(self) -> subprocess.Popen[bytes]:
        port = self.url.rpartition(":")[2]
        own = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", str(free_port())]
        return subprocess.Popen(
            [sys.executable, "-m", "smg.launch_router", *own, "--api-key", self.key, *self._arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def restart(self) -> None:
        """Kill it, and start it anew at the same address, without workers."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()
        eventually(self._is_up, 60)

    def _is_up(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def listed(self) -> dict[str, str]:
        return {worker["url"]: worker["id"] for worker in self._http.get("/workers").json()["workers"]}

    def reporting(self) -> set[str]:
        """Return the workers whose load it has read."""
        return {load["worker"] for load in self._http.get("/loads").json()["loads"]}

    def use(self, *urls: str) -> None:
        """Bring its list of workers to these."""
        for url, number in self.listed().items():
            if url not in urls:
                self._http.delete(f"/workers/{number}")
        for url in set(urls).difference(self.listed()):
            self.register(url)
        eventually(lambda: self.listed().keys() == set(urls))

    def register(self, url: str) -> None:
        """Ask it to add a worker to its list, which takes a moment."""
        at_once = {"drain_settle_secs": 0}
        self._http.post("/workers", json={"url": url, "api_key": self.key, "health": at_once})

    def end(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def two_workers(
    gateway: RealGateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FakeSGLang, FakeSGLang]]:
    """Put two workers on the gateway's list, and its key into the environment."""
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    with FakeSGLang(api_key=gateway.key) as one, FakeSGLang(api_key=gateway.key) as two:
        gateway.use(one.url, two.url)
        yield one, two
    gateway.use()
