"""`sglang.launch_server` started and ended by us, on a free loopback port with a key of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from batchrunner.engines.device import CPU_NOTE, cpu_environment, on_cpu, server_args
from batchrunner.engines.http import HttpEngine
from batchrunner.engines.loglines import LogLoad
from batchrunner.engines.model import check_model, model_identity
from batchrunner.engines.serverlog import cause_in, last_line
from batchrunner.errors import EngineLostError, EngineStartError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchrunner.job import ServerEngine
    from batchrunner.records import Completion, EngineInfo, Request, Signals

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE_S = 10.0
POLL_S = 0.25
WORD_EVERY_S = 15.0
"""Loading takes minutes for large models: a sign of life, with the last line of the log."""


LOG_BYTES = 4 << 20
"""Of the log, read at most at one look."""


class LaunchedServer:
    """An SGLang server that lives as long as this object is open, and never longer than this process."""

    def __init__(self, spec: ServerEngine, *, log_path: Path, request_timeout_s: float) -> None:
        self._spec = spec
        self._log_path = log_path
        self._timeout_s = request_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._client: HttpEngine | None = None
        self._log_load: LogLoad | None = None
        self._log_read = log_path.stat().st_size if log_path.exists() else 0

    async def open(self) -> EngineInfo:
        """Start the server and wait until it is ready; see `Engine.open`."""
        check_model(self._spec.model)
        cpu = on_cpu(self._spec.device)
        key, port = secrets.token_urlsafe(24), _free_port()
        url = f"http://127.0.0.1:{port}"
        await self._launch(key, port, cpu=cpu)
        await self._wait_until_ready(url, key)
        self._client = HttpEngine([url], api_key=key, request_timeout_s=self._timeout_s)
        info = await self._client.open()
        if not self._client.tells_load:
            self._log_load = LogLoad(url)
        notes = (*((CPU_NOTE,) if cpu else ()), *info.notes)
        return dataclasses.replace(
            info, kind="server", model=model_identity(self._spec.model), log=str(self._log_path), notes=notes
        )

    async def generate(self, request: Request, route: str) -> Completion:
        """Send one request once; see `Engine.generate`."""
        assert self._client is not None
        try:
            return await self._client.generate(request, route)
        except RequestError:
            # a connection is lost moments before the process is seen dead: the row's next try finds out
            if self._process is None or self._process.returncode is not None:
                raise EngineLostError(self._obituary("the engine died")) from None
            raise

    async def signals(self) -> Sequence[Signals]:
        """Return the server's load now, out of its log where it tells it nowhere else."""
        if self._client is None or self._log_load is None:
            return await self._client.signals() if self._client else []
        with self._log_path.open("rb") as log:
            log.seek(self._log_read)
            text = log.read(LOG_BYTES)
        whole = text.rfind(b"\n") + 1
        self._log_read += whole
        self._log_load.read(text[:whole].decode(errors="replace").splitlines())
        return self._log_load.signals()

    async def close(self) -> None:
        """End the server and everything it started."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            process.stdin.close()  # the launcher ends the server when its pipe ends
            await process.wait()

    async def _launch(self, key: str, port: int, *, cpu: bool) -> None:
        spec = self._spec
        python = spec.python or sys.executable
        argv = ["--model-path", spec.model, "--host", "127.0.0.1", "--port", str(port)]
        argv += to_argv(server_args(spec.args, cpu=cpu))
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without its bytecode SGLang starts twice as slowly
        if cpu:
            environ |= cpu_environment(environ)
        if Path(spec.model).exists():
            environ.setdefault("HF_HUB_OFFLINE", "1")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        log.info("starting SGLang for %s on port %d; its log: %s", spec.model, port, self._log_path)
        try:
            self._process = await asyncio.create_subprocess_exec(
                python, str(LAUNCHER),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, env={**environ, **spec.env},
            )  # fmt: skip
        except OSError as failure:
            raise EngineStartError(f"engine.python {python}: cannot be run: {failure}") from None
        config = {
            "module": "sglang.launch_server", "argv": argv, "secret": key, "secret_flag": "--api-key",
            "log": str(self._log_path), "grace_s": GRACE_S,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(config) + b"\n")
        await self._process.stdin.drain()

    async def _wait_until_ready(self, url: str, key: str) -> None:
        began = time.monotonic()
        next_word_s = WORD_EVERY_S
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            while not await _is_ready(session, url):
                assert self._process is not None
                if self._process.returncode is not None:
                    raise EngineStartError(self._obituary("the engine did not start"))
                waited_s = time.monotonic() - began
                if waited_s > next_word_s:
                    next_word_s += WORD_EVERY_S
                    log.info("still starting (%.0f s): %s", waited_s, last_line(self._log_path)[:120])
                    if "address already in use" in cause_in(self._log_path):  # SGLang then hangs
                        raise EngineStartError(self._obituary("the engine did not start"))
                if waited_s > self._spec.start_timeout:
                    raise EngineStartError(
                        self._obituary(f"the engine was not ready within {self._spec.start_timeout:g} s")
                    )
                await asyncio.sleep(POLL_S)

    def _obituary(self, what: str) -> str:
        cause = cause_in(self._log_path)
        if "No module named 'sglang'" in cause or "No module named sglang" in cause:
            python = self._spec.python or sys.executable
            return f"{what}: {python} has no SGLang: install batchrunner[engine], or set engine.python"
        code = self._process.returncode if self._process else None
        status = "" if code is None else f" (exit {code})"
        return f"{what}{status}: {cause or 'its log is empty'} [{self._log_path}]"


def to_argv(args: dict[str, Any]) -> list[str]:
    """Turn `{mem-fraction-static: 0.8, enable-metrics: true}` into a command line."""
    argv: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            argv += [str(item) for item in value]
        elif isinstance(value, dict):
            argv.append(orjson.dumps(value).decode())
        elif value is not True:
            argv.append(str(value))
    return argv


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Ask `/ready`; releases before it existed answer 404 there and are ready when `/model_info` answers."""
    timeout = aiohttp.ClientTimeout(total=5)
    for path in ("/ready", "/model_info"):
        try:
            async with session.get(url + path, timeout=timeout) as response:
                if response.status != 404:  # noqa: PLR2004
                    return response.status == 200  # noqa: PLR2004
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
