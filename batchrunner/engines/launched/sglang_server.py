"""One `sglang.launch_server` on a loopback port, with the job's arguments or safer ones."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EngineStartError
from batchrunner.engines.device import program_environment, server_args
from batchrunner.engines.http.connections import HeldPort
from batchrunner.engines.launched.process import LaunchedProcess, to_argv
from batchrunner.engines.recovery.diagnosis import EndedServer
from batchrunner.engines.recovery.healer import Healer
from batchrunner.engines.recovery.host import oom_kills
from batchrunner.job.engine import LaunchedEngine

log = logging.getLogger(__name__)

START_TRIES = 3
"""SGLang draws a port for its processes and binds it seconds later: of eight servers that start on a node at
once, two draw the same one in 28 of 8,000 starts."""
TOKENIZERS = "tokenizer-worker-num"
"""Argument above 1 of which SGLang 0.5.23 refuses to start with an API key."""
_READY_PATHS = ("/ready", "/model_info")
"""Paths that answer 200 when a server takes requests; releases before `/ready` answer 404 there."""


class SGLangServer:
    """A server of `model` with the job's arguments; it can be started again on the same port."""

    def __init__(
        self,
        spec: LaunchedEngine,
        model: str,
        *,
        key: str,
        log_path: Path,
        cpu: bool,
        name: str = "the engine",
        argv: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        healer: Healer | None = None,
    ) -> None:
        """`spec` describes all servers of a job; the other arguments are those of this server."""
        self._port = HeldPort()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self._model = model
        self._start_timeout_s = spec.start_timeout
        self._key = key
        self._own_argv = [
            *("--model-path", model, "--host", "127.0.0.1", "--port", str(self._port.number)), *argv,
        ]  # fmt: skip
        self._given = server_args(spec.args, cpu=cpu)
        self._healer = healer
        self._args: dict[str, Any] = {}  # of the last start
        self._kills: int | None = None  # the kernel's count at the last start
        self._is_up = False
        offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")} if Path(model).exists() else {}
        self.process = LaunchedProcess(
            module="sglang.launch_server",
            argv=self._own_argv,
            key=key,
            environ=program_environment({**offline, **spec.env, **(environ or {})}, cpu=cpu),
            log_path=log_path,
            python=spec.python,
            name=name,
        )

    async def start(self) -> None:
        """Start it and wait until it takes requests; raises EngineStartError where it does not.

        A start that fails for want of memory is repeated with safer arguments, as after a death.
        """
        self._is_up = False
        while not self._is_up:
            self._args = {**self._given, **(self._healer.next_args if self._healer else {})}
            self.process.argv = [*self._own_argv, *to_argv(self._args)]
            self.process.key = self._key_for_start()
            self._kills = oom_kills()
            try:
                await self._start()
            except EngineStartError:
                if not self.heal():
                    raise
                await self.process.stop()
            else:
                self._is_up = True

    def heal(self) -> bool:
        """Change the next start's arguments by the cause of death; return whether any help."""
        if self._healer is None or self.process.exit_code is None:
            return False
        return self._healer.heal(self.process.name, self._ended())

    async def close(self) -> None:
        """End it, and give its port back."""
        if self._healer and self._is_up and self.process.runs:
            self._healer.outlived(self._ended())
        await self.process.stop()
        self._port.release()

    def _key_for_start(self) -> str:
        workers = str(self._args.get(TOKENIZERS, 1))
        if workers == "1":
            return self._key
        log.warning(
            "%s needs no key, and every user of this machine can use it: SGLang takes none with --%s %s",
            self.process.name, TOKENIZERS, workers,
        )  # fmt: skip
        return ""

    def _ended(self) -> EndedServer:
        kills = (oom_kills() or 0) - (self._kills or 0)
        return EndedServer(self.process.logged(), self._args, self.process.exit_code, kills)

    async def _start(self) -> None:
        log.info("starting SGLang for %s at %s; its log: %s", self._model, self.url, self.process.log_path)
        for tries_left in reversed(range(START_TRIES)):
            await self.process.start()
            try:
                await self.process.wait_until_ready(self.url, _READY_PATHS, self._start_timeout_s)
            except EngineStartError:
                if not tries_left or not self.process.found_port_taken():
                    raise
            else:
                return
            log.warning("%s: another process took one of its ports: starting it again", self.process.name)
            await self.process.stop()
