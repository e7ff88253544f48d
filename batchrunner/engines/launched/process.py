"""A program started and ended by us, through the launcher: its start, its end, and why it died."""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from batchrunner.core.errors import EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.logs.cause import cause_in, head_and_tail, last_line

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")


@dataclass(slots=True)
class LaunchedProcess:
    """A Python module that runs as a program, never longer than this process; it can be started again."""

    module: str
    argv: Sequence[str]
    """The program's arguments, without the key."""
    key: str
    """An API key that no argument vector, environment or log shows."""
    environ: Mapping[str, str]
    log_path: Path
    python: str | None = None
    """The interpreter, where it is not this one."""
    name: str = "the engine"
    """The program's name in messages."""
    needs: str = "SGLang: install batchrunner[engine], or set engine.python"
    """Package to install if the interpreter does not have the module, for the error."""
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _log_begins: int = field(default=0, init=False)

    @property
    def runs(self) -> bool:
        """Whether the program was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """The exit status of the last start; None while the program runs, and after `stop`."""
        return self._process.returncode if self._process else None

    def logged(self) -> list[str]:
        """Return the first and the last lines that the program logged since its last start."""
        return head_and_tail(self.log_path, self._log_begins)

    async def start(self) -> None:
        """Start the program; raises EngineStartError where the interpreter cannot be run."""
        python = self.python or sys.executable
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_begins = self.log_path.stat().st_size if self.log_path.exists() else 0
        try:
            self._process = await asyncio.create_subprocess_exec(
                python, str(LAUNCHER),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, env=dict(self.environ),
            )  # fmt: skip
        except OSError as failure:
            raise EngineStartError(f"engine.python {python}: cannot be run: {failure}") from None
        config = {
            "module": self.module, "argv": list(self.argv), "secret": self.key, "secret_flag": "--api-key",
            "log": str(self.log_path),
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(config) + b"\n")
        await self._process.stdin.drain()

    async def wait_until_ready(self, url: str, paths: Sequence[str], timeout_s: float) -> None:
        """Return when a GET gives 200 on the first of these paths that the program knows (not 404).

        Raises EngineStartError if the program ends or takes too long.
        """
        began = time.monotonic()
        next_word_s = TIMING.launch_word
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as session:
            while not await _is_ready(session, url, paths):
                if not self.runs:
                    raise EngineStartError(self.failure_message(f"{self.name} did not start"))
                waited_s = time.monotonic() - began
                if waited_s > next_word_s:
                    next_word_s += TIMING.launch_word
                    log.info("still starting (%.0f s): %s", waited_s, last_line(self.log_path)[:120])
                    if self.found_port_taken():  # SGLang then hangs
                        raise EngineStartError(self.failure_message(f"{self.name} did not start"))
                if waited_s > timeout_s:
                    raise EngineStartError(
                        self.failure_message(f"{self.name} was not ready within {timeout_s:g} s")
                    )
                await asyncio.sleep(TIMING.launch_poll)

    async def ended(self) -> None:
        """Return when the program has ended, for whatever reason."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End the program and everything it started; may be called again if it was cancelled."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the launcher ends its program when its pipe ends
            await self._process.wait()
            self._process = None

    def found_port_taken(self) -> bool:
        """Tell whether the last start failed because another process has one of its ports."""
        return "address already in use" in cause_in(self.log_path, self._log_begins).lower()

    def failure_message(self, what: str) -> str:
        """Return `what` with the exit status and the cause from the log."""
        cause = cause_in(self.log_path, self._log_begins)
        package = self.module.partition(".")[0]
        if f"No module named '{package}'" in cause or f"No module named {package}" in cause:
            return f"{what}: {self.python or sys.executable} has no {self.needs}"
        status = "" if self.exit_code is None else f" (exit {self.exit_code})"
        return f"{what}{status}: {cause or 'its log is empty'} [{self.log_path}]"


def to_argv(args: Mapping[str, Any]) -> list[str]:
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


async def _is_ready(session: aiohttp.ClientSession, url: str, paths: Sequence[str]) -> bool:
    timeout = aiohttp.ClientTimeout(total=5)
    for path in paths:
        try:
            async with session.get(url + path, timeout=timeout) as response:
                if response.status != 404:  # noqa: PLR2004
                    return response.status == 200  # noqa: PLR2004
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
    return False
