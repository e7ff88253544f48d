"""A program that a run starts, restarts when it dies or hangs, until no start helps, and ends."""

import asyncio
import contextlib
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import orjson

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import EngineLostError, EngineStartError
from batchrunner.core.timing import TIMING
from batchrunner.engines.hang_detector import Hang
from batchrunner.engines.logs.lines import step_in
from batchrunner.engines.recovery import cause_in, head_and_tail

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
PLANNED = Hang(0.0, "is started again as planned")
"""What stands for a hang where a program is restarted though it is well."""
MOST_QUICK_DEATHS = 8
"""More quick deaths in succession are a crash loop. A row that kills the engine is given up after four
deaths, so the limit tolerates two such rows in succession."""
VERDICT_S = 30.0
"""Longest wait, in seconds, for the cause of a death: a launcher takes up to 20 s to end what is left."""


@dataclass(eq=False, repr=False)  # it has a key
class SupervisedProgram(ABC):
    """A Python module that runs as a program, never longer than this process, and is restarted when it ends.

    `start` starts it; from then on `watch` restarts it.
    """

    needs: ClassVar = "SGLang: install batchrunner[engine], or set engine.python"
    """Package to install if the interpreter does not have the module, for the error."""

    module: str
    key: str
    """An API key that no argument vector or environment shows."""
    environ: Mapping[str, str]
    log_path: Path
    python: str | None
    """The interpreter; None for our own."""
    name: str
    """Its name in messages."""
    incidents: list[Incident]
    argv: Sequence[str] = ()
    """The program's arguments, without the key."""
    starter: Sequence[str] = ()
    """A command that starts it on each of several machines; without one it runs here."""
    up: bool = False
    """Whether it is in use: it runs, and is ready."""
    lost: EngineLostError | None = None
    """Why the program is not restarted any more, once that is so."""
    _process: asyncio.subprocess.Process | None = None
    _logs: Mapping[Path, int] = field(default_factory=dict)  # where the last start begins in each log
    _hung: asyncio.Future[Hang] | None = None
    _healed: bool = False
    _judged_at: float = -math.inf
    _verdict: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next death
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # set while the program is up, or lost

    @abstractmethod
    async def start(self) -> None:
        """Start the program and wait until it is ready; raises EngineStartError where it does not."""

    @abstractmethod
    async def set_up(self, *, up: bool) -> None:
        """Put the program into use again, or take it out of use."""

    def heal(self) -> bool:
        """Change the next start so that it avoids the cause of death; return whether that is possible."""
        return False

    @property
    def exit_code(self) -> int | None:
        """The exit status of the last start; None while the program runs, and after `stop`."""
        return self._process.returncode if self._process else None

    @property
    def log_begins(self) -> int:
        """Where the last start begins in its log, in bytes."""
        return self._logs.get(self.log_path, 0)

    def logged(self) -> list[str]:
        """Return the first and the last lines that the program logged since its last start."""
        return [line for log in self._all_logs() for line in head_and_tail(log, self._logs.get(log, 0))]

    def _all_logs(self) -> list[Path]:
        """Return its log, and those of its other machines."""
        others = self.log_path.parent.glob(f"{self.log_path.stem}-node*{self.log_path.suffix}")
        return [self.log_path, *sorted(others)]

    def _cause(self) -> str:
        """Return what the logs say of the end of the last start, each machine's once."""
        found = [cause_in(log, self._logs.get(log, 0)) for log in self._all_logs()]
        return " / ".join(filter(None, dict.fromkeys(found)))

    async def launch(self) -> None:
        """Start the program; raises EngineStartError where the interpreter cannot be run."""
        python = self.python or sys.executable
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._logs = {log: log.stat().st_size for log in self._all_logs() if log.exists()}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.starter, python, str(LAUNCHER),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, env=dict(self.environ),
            )  # fmt: skip
        except OSError as failure:
            raise EngineStartError(f"engine.python {python}: cannot be run: {failure}") from None
        config: dict[str, Any] = {
            "module": self.module,
            "argv": self.argv,
            "key": self.key,
            "log": str(self.log_path),
        }
        config["ranks"] = bool(self.starter)
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(config) + b"\n")
        await self._process.stdin.drain()

    async def wait_until_ready(self, url: str, timeout_s: float) -> None:
        """Return when a GET gives 200; raises EngineStartError if the program ends or takes too long.

        So does 404: a server that lacks the path listens once it has loaded the model.
        """
        began = time.monotonic()
        next_word_s = TIMING.launch_word
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as session:
            while not await _is_ready(session, url):
                waited_s = time.monotonic() - began
                hangs = False
                if waited_s > next_word_s:
                    next_word_s += TIMING.launch_word
                    step = next(filter(None, map(step_in, reversed(self.logged()))), "")
                    log.info(
                        "%s is still starting, %.0f s%s", self.name, waited_s, f": {step}" if step else ""
                    )
                    hangs = self.found_port_taken()  # SGLang goes on, and never listens
                if self.exit_code is not None or hangs:
                    raise EngineStartError(self.failure_message("did not start"))
                if waited_s > timeout_s:
                    raise EngineStartError(self.failure_message(f"was not ready within {timeout_s:g} s"))
                await asyncio.sleep(TIMING.launch_poll)

    async def stop(self) -> None:
        """End the program and everything it started; may be called again if it was cancelled."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the launcher ends its program when its pipe ends
            await self._process.wait()
            self._process = None

    def found_port_taken(self) -> bool:
        """Tell whether the last start failed because another process has one of its ports."""
        return "address already in use" in self._cause().lower()

    def failure_message(self, what: str) -> str:
        """Return the program's name and `what`, with the exit status and the cause from the log."""
        cause = self._cause()
        package = self.module.partition(".")[0]
        if f"No module named '{package}'" in cause or f"No module named {package}" in cause:
            return f"{self.name} {what}: {self.python or sys.executable} has no {self.needs}"
        status = "" if self.exit_code is None else f" (exit {self.exit_code})"
        return f"{self.name} {what}{status}: {cause or 'its log says nothing'} [{self.log_path}]"

    async def ready(self) -> None:
        """Return when the program is up; raises EngineLostError when it will not be again."""
        await self._settled.wait()
        if self.lost is not None:
            raise self.lost

    async def drain(self) -> None:  # noqa: B027 - where nothing is under way
        """Let what is under way end, for a while, before a planned restart."""

    def hangs(self, hang: Hang) -> None:
        """Have the program ended and restarted: it is up, but does nothing."""
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(hang)

    async def excuses(self, sent_at: float) -> bool:
        """Tell whether a death after `sent_at` was healed: then no row is at fault."""
        if self._judged_at < sent_at:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VERDICT_S):
                    await self._verdict.wait()
        return self._judged_at >= sent_at and self._healed

    async def watch(self) -> None:
        """Restart the program whenever it ends; returns when it is lost."""
        try:
            await self._watch()
        except Exception as failure:  # or those who wait in `ready` would wait for ever
            self.lost = EngineLostError(f"{self.name}: {type(failure).__name__}: {failure}")
            raise
        finally:
            self._settled.set()

    async def _watch(self) -> None:
        quick_deaths, began = 0, time.monotonic()
        self.up = True
        self._settled.set()
        while True:
            hang = await self._end()
            self.up = False
            self._settled.clear()
            lived_s = time.monotonic() - began - (hang.silent_s if hang else 0)
            cause = await self._take_down(hang)
            self._judge(healed=hang is PLANNED or self.heal())
            if not self._healed:
                quick_deaths = quick_deaths + 1 if lived_s < TIMING.quick_death else 1
            if quick_deaths > MOST_QUICK_DEATHS:
                self.lost = EngineLostError(f"{cause} (for the {quick_deaths}th time in a row)")
                self.incidents.append(Incident("lost", self.name, str(self.lost)))
                log.warning("%s: not started again", self.name)
                return
            count = f" ({quick_deaths} of at most {MOST_QUICK_DEATHS} times in a row)"
            log.warning("%s: started again%s", self.name, "" if self._healed else count)
            if quick_deaths > 1:
                await asyncio.sleep(
                    min(TIMING.first_restart * 2.0 ** (quick_deaths - 2), TIMING.longest_restart)
                )
            try:
                await self.start()
            except EngineStartError:  # the next pass of the loop finds the program ended and says why
                await self.stop()
            else:
                self.up = True
                self._settled.set()
                await self.set_up(up=True)
                self.incidents.append(Incident("back", self.name))
                log.warning("%s is back", self.name)
            began = time.monotonic()

    def _judge(self, *, healed: bool) -> None:
        """Publish the verdict on a death to those who wait for it."""
        self._healed, self._judged_at = healed, time.monotonic()
        self._verdict.set()
        self._verdict = asyncio.Event()

    async def _end(self) -> Hang | None:
        """Return when the program has ended, or with the hang when it hangs."""
        if self._process is None:
            return None
        self._hung = hung = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return hung.result() if hung.done() else None

    async def _take_down(self, hang: Hang | None) -> str:
        """Report why the program is of no use any more, take it out of use, and end it if it hangs."""
        cause = f"{self.name} {hang.why}" if hang else self.failure_message("died")
        if hang is PLANNED:
            await self.drain()
        else:
            self.incidents.append(Incident("hangs" if hang else "died", self.name, cause))
            log.warning("%s", cause)
        await self.set_up(up=False)
        if hang:
            await self.stop()
        return cause


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


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status in {200, 404}
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
