"""One SGLang server that a run starts, restarts when it dies or hangs, and ends."""

import asyncio
import contextlib
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from batchrunner.core.engine_info import Incident
from batchrunner.core.errors import EngineDownError, EngineLostError, EngineStartError, install_command
from batchrunner.core.timing import TIMING
from batchrunner.engines.hang_detector import Hang
from batchrunner.engines.http.connections import HeldPort, free_port
from batchrunner.engines.http.server import Liveness
from batchrunner.job.engine import ServerEngine
from batchrunner.sglang.device import oom_kills, program_environment, server_args
from batchrunner.sglang.flags import arguments_in, command_line, spellings, variables_in
from batchrunner.sglang.logs.causes import cause_in, head_and_tail
from batchrunner.sglang.logs.lines import step_in
from batchrunner.sglang.model_files import model_directory, model_identity
from batchrunner.tuning.memory import FlagMemory
from batchrunner.tuning.recover import EndedServer, Healer

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
"""Script that starts a server, and ends it when this process ends."""
MODULE = "sglang.launch_server"
PLANNED = Hang(silent_s=0.0, why="is started again as planned")
"""Reason for a restart that flag tuning has requested. It is handled like a hang of the server."""
START_TRIES = 3
"""Maximum number of attempts if another process has taken a port of the server. SGLang draws ports for its
processes and binds them seconds later. If eight servers start on a node at the same time, two of them draw
the same port in 28 of 8,000 starts."""
GROUP = "BATCHRUN_RAY_GROUP"
"""Environment variable with the placement group of a Ray worker whose engine spans several machines."""
RAY_RANKS = Path(__file__).parents[2] / "ray" / "ranks.py"
"""Script that starts a program on all machines of a Ray worker's placement group."""
TOKENIZERS = "tokenizer-worker-num"
"""Argument for the number of tokenizer processes. With more than 1 and an API key, SGLang 0.5.23 refuses to
start."""
NO_GPU = re.compile(
    "No accelerator .* is available|No CUDA GPUs are available|Found no NVIDIA driver"
    "|Torch not compiled with CUDA enabled"
)
"""Messages of SGLang and torch on a machine without a usable GPU."""
MOST_QUICK_DEATHS = 8
"""Maximum number of quick deaths in a row; after one more, the server is not restarted. A row that kills the
server fails after four deaths, so two such rows, one after the other, do not end the run."""
RECOVERY_WAIT_S = 30.0
"""Maximum seconds for which a row waits until recovery has examined a death. The launcher may need 20 s to
kill all processes."""


class _Recovery:
    """Result of the recovery after a server's last death. The rows that the death has hit wait for it."""

    def __init__(self) -> None:
        self.is_healed = False
        """Whether recovery has found safer arguments, or the restart was planned."""
        self._ended_at = -math.inf
        """Time at which the last recovery ended, in seconds of the monotonic clock."""
        self._next_end = asyncio.Event()
        """Set when the recovery after the next death has ended."""

    def record(self, *, is_healed: bool) -> None:
        """Record the result of a recovery, and wake the rows that wait for it."""
        self.is_healed = is_healed
        self._ended_at = time.monotonic()
        self._next_end.set()
        self._next_end = asyncio.Event()

    async def excuses(self, sent_at: float) -> bool:
        """Tell whether a row that was sent at `sent_at`, before the server died, is not at fault."""
        # Recovery may not have examined this death yet. So wait for its result.
        if self._ended_at < sent_at:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_WAIT_S):
                    await self._next_end.wait()
        return self._ended_at >= sent_at and self.is_healed


class SGLangServer:
    """One `sglang.launch_server` with the job's arguments, or with safer ones after a death.

    `start` starts the server. From then on `watch` restarts it. The server never outlives this process.
    """

    def __init__(
        self,
        spec: ServerEngine,
        model: str,
        *,
        key: str,
        log_path: Path,
        cpu: bool,
        name: str = "the engine",
        environ: Mapping[str, str] | None = None,
        healer: Healer | None = None,
        memory: FlagMemory | None = None,
        incidents: list[Incident],
    ) -> None:
        """`spec` describes all servers of the job; `environ` has variables for this server alone."""
        self.name = name
        """Name of the server in messages."""
        self.log_path = log_path
        """Log of the server on this machine."""
        self.incidents = incidents
        """Incidents of all servers of the run."""
        self.liveness = Liveness()
        """Whether the server is alive; the client shares this state."""

        offline: dict[str, str] = {}
        if Path(model).exists():
            # The model is on this machine, so no request to the Hugging Face Hub is needed.
            offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        self.environ = program_environment({**offline, **spec.env, **(environ or {})}, cpu=cpu)
        self.key = key
        """API key of the server. It is in no argument vector and in no environment variable."""
        self._python = spec.python or sys.executable
        self._nodes = spec.nodes
        # Beginning of the command that starts the launcher; empty on a single machine.
        self._command_prefix = _command_prefix(spec.nodes) if spec.nodes > 1 else ()
        # Arguments of `local_copy` in launcher.py; None if the server loads the original files.
        self._copy: Mapping[str, str] | None = None
        if spec.cache_dir:
            self._copy = _model_copy(model, revision=spec.args.get("revision"), cache_dir=spec.cache_dir)
        self._port = HeldPort()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self._base_argv = [
            "--model-path", model, "--host", "127.0.0.1", "--port", str(self._port.number),
        ]  # fmt: skip
        self._start_timeout_s = spec.start_timeout

        # Flags come from three sources: the job, flag tuning, and the recovery after a death.
        self._job_args = server_args(spec.args, cpu=cpu)
        # Flags and variables of the job, which flag tuning may not change.
        self._set_by_job = {**spec.args, **spec.env}
        # Chooses safer arguments after a death; None without recovery.
        self._healer = healer
        # Flags that earlier runs of similar jobs have learned; None if flags are not tuned.
        self._memory = memory
        self.adapted = dict(memory.args) if memory else {}
        """Tuned flags and variables, which are added to the flags of the job."""
        # Whether the tuned flags were learned in an earlier run.
        self._is_recalled = bool(self.adapted)
        # Flags to which the server returns if it dies with tuned flags on trial; None if none are on trial.
        self._previous: Mapping[str, Any] | None = {} if self._is_recalled else None
        # Whether the planned restart is cancelled, because a run is stopping.
        self._is_restart_cancelled = False

        # The next attributes describe the last start.

        # Process of the launcher; None before the first start and after `stop`.
        self._process: asyncio.subprocess.Process | None = None
        # Arguments of the server, without those in `_base_argv`.
        self._args: dict[str, Any] = {}
        # Byte offset in each log at which the last start begins.
        self._log_offsets: Mapping[Path, int] = {}
        # Number of processes that the kernel had killed for lack of memory before the last start.
        self._oom_kills_before: int | None = None
        self.start_s = 0.0
        """Seconds that the last start took."""

        # The next attributes describe the present state.
        self.up = False
        """Whether the server is ready and takes rows."""
        self.has_work = False
        """Whether the server had rows at the last poll. It is updated only while the server is not up."""
        self.lost: EngineLostError | None = None
        """Reason why the server will not be restarted again; None while it may be restarted."""
        # Set while the server is up or lost, so that no row needs to wait.
        self._settled = asyncio.Event()
        # Future of the server's next hang; None before the server is watched.
        self._hang: asyncio.Future[Hang] | None = None

        # Result of the recovery after the last death.
        self._recovery = _Recovery()

    async def start(self) -> None:
        """Start the server and wait until it takes requests; raises EngineStartError if that fails.

        A start that fails for lack of memory is repeated with safer arguments, as after a death.
        """
        tries_left = START_TRIES
        while True:
            self._args = self._args_of_next_start()
            if str(self._args.get(TOKENIZERS, 1)) != "1":
                self.key = ""
                log.warning(
                    "%s has no API key, because SGLang refuses a key with --%s: "
                    "every user of this machine can send requests to it",
                    self.name, TOKENIZERS,
                )  # fmt: skip
            self._oom_kills_before = oom_kills()
            log.info("starting SGLang at %s; its log: %s", self.url, self.log_path)
            began = time.monotonic()
            await self._launch()
            try:
                await self._wait_until_ready()
            except EngineStartError:
                tries_left -= 1
                if tries_left and self._found_port_taken():
                    log.warning("%s: starts again, because another process took one of its ports", self.name)
                elif not self._choose_other_arguments():
                    raise
                await self.stop()
            else:
                self.start_s = time.monotonic() - began
                # The flags of an earlier run are forgotten only now. A start with them has failed, but only
                # the success of this start without them shows that they were the cause.
                if self._is_recalled and self._previous is None and self._memory:
                    self._memory.forget()
                    self._is_recalled = False
                return

    def _args_of_next_start(self) -> dict[str, Any]:
        """Return the arguments of the server for its next start, without those in `_base_argv`."""
        args = {**self._job_args, **arguments_in(self.adapted), **self._safer}
        if self._nodes > 1:
            # The port may have been taken since the last start, so each start draws a new one.
            args |= {"nnodes": self._nodes, "dist-init-addr": f"{socket.gethostname()}:{free_port()}"}
        return args

    @property
    def _safer(self) -> Mapping[str, Any]:
        """Arguments that recovery has changed after deaths of the run's servers."""
        return self._healer.args if self._healer else {}

    def may_change(self, name: str) -> bool:
        """Tell whether flag tuning may change a flag or variable.

        It may change none that the job sets (even abbreviated), none that recovery has changed after a death,
        and no variable that was tuned already.
        """
        fixed_names = {**self._set_by_job, **self._safer, **variables_in(self.adapted)}
        # The job may abbreviate a flag, because argparse accepts any beginning of a flag's name.
        return not any(spelling.startswith(fixed) for spelling in spellings(name) for fixed in fixed_names)

    def adapt(self, args: Mapping[str, Any], why: str) -> None:
        """Restart the server with other tuned flags and variables, once its rows have ended.

        If the server dies with the new flags, it returns to the previous ones.
        """
        self._previous = self.adapted
        self._change_flags(args, why)
        self.up = False
        # From now on, flags of this run are on trial, not those of an earlier run.
        self._is_recalled = False
        self._is_restart_cancelled = False
        self._settled.clear()
        # `_watch` handles a planned restart like a hang, but first lets the rows end.
        self.report_hang(PLANNED)

    def end_trial(self) -> None:
        """End the trial of the tuned flags: if the server dies from now on, it keeps them."""
        self._previous, self._is_recalled = None, False

    def cancel_restart(self) -> None:
        """Cancel a planned restart, unless it has begun, and let the rows that wait for the server fail.

        A run that is stopping calls this again and again, so that none of its rows waits for a restart. Rows
        of other runs on the same servers are sent again later.
        """
        self._is_restart_cancelled = True
        if not self._settled.is_set():
            # This wakes the rows that wait now, and no later ones.
            self._settled.set()
            self._settled.clear()

    def _keep_flags(self) -> None:
        """Return to the flags with which the server runs, because the planned restart was cancelled."""
        assert self._previous is not None
        self.adapted, self._previous = dict(self._previous), None
        why = "keeps its flags, because the run is stopping"
        log.warning("%s %s", self.name, why)
        self.incidents.append(Incident("back", self.name, why))
        self.up = True
        self._settled.set()

    def _change_flags(self, args: Mapping[str, Any], why: str) -> None:
        """Set the tuned flags of the next start, and report the change."""
        flags = command_line(args) or "the job's flags"
        log.warning("%s: starts again with %s: %s", self.name, flags, why)
        change = {"old": self.adapted, "new": dict(args)}
        self.incidents.append(Incident("adapts", self.name, why, change))
        self.adapted = dict(args)

    async def _drain(self) -> None:
        """Wait until the server's rows have ended, at most for as long as its last start took.

        New rows wait for the restart, or go to other servers.
        """
        # The server is assumed to have work until the next poll.
        self.has_work = True
        deadline = time.monotonic() + self.start_s
        while self.has_work and time.monotonic() < deadline and not self._is_restart_cancelled:  # noqa: ASYNC110 - polls set it
            await asyncio.sleep(TIMING.load_poll)

    def _choose_other_arguments(self) -> bool:
        """Choose arguments for the next start by the cause of the last death.

        Return False if no other arguments may help.
        """
        # If the server died with flags on trial, they are the likely cause: go back to the previous ones.
        if self._previous is not None:
            previous, self._previous = self._previous, None
            self._change_flags(previous, self._failure_message("died with the new flags"))
            return True
        if self._healer is None or self._exit_code is None:
            return False
        kills_since_start = (oom_kills() or 0) - (self._oom_kills_before or 0)
        ended_server = EndedServer(self._log_lines(), self._args, self._exit_code, kills_since_start)
        return self._healer.heal(self.name, ended_server)

    async def close(self) -> None:
        """End the server, and release its port."""
        if self._healer and self.up:
            self._healer.outlived(self._args)
        await self.stop()
        self._port.release()

    @property
    def _exit_code(self) -> int | None:
        """Exit status of the server's process; None while it runs, and after `stop`."""
        return self._process.returncode if self._process else None

    @property
    def log_offset(self) -> int:
        """Byte offset in the server's log at which the last start begins."""
        return self._log_offsets.get(self.log_path, 0)

    def _log_lines(self) -> list[str]:
        """Return the first and the last lines that the server has logged since its last start."""
        lines = []
        for path in self._all_logs():
            lines += head_and_tail(path, self._log_offsets.get(path, 0))
        return lines

    def _all_logs(self) -> list[Path]:
        """Return the server's log on this machine, and its logs on other machines."""
        node_logs = self.log_path.parent.glob(f"{self.log_path.stem}-node*{self.log_path.suffix}")
        return [self.log_path, *sorted(node_logs)]

    def _cause(self) -> str:
        """Return why the server last ended: the causes in the logs of all machines, each cause once."""
        causes = [cause_in(path, self._log_offsets.get(path, 0)) for path in self._all_logs()]
        return " / ".join(filter(None, dict.fromkeys(causes)))

    async def _launch(self) -> None:
        """Start the launcher; raises EngineStartError if the interpreter cannot be run."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Logs of earlier starts are kept. So the log of this start begins at the present end of each file.
        self._log_offsets = {path: path.stat().st_size for path in self._all_logs() if path.exists()}
        config = {
            "module": MODULE,
            "argv": [*self._base_argv, *to_argv(self._args)],
            "key": self.key,
            "log": str(self.log_path),
            "copy": self._copy,
            "ranks": self._nodes > 1,
        }
        self._process = await launch(
            self._python,
            config,
            environ={**self.environ, **variables_in(self.adapted)},
            command_prefix=self._command_prefix,
        )

    async def _wait_until_ready(self) -> None:
        """Wait until the server is ready; raises EngineStartError if it ends or takes too long."""
        began = time.monotonic()
        next_report_s = TIMING.launch_word
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"}) as session:
            while not await _is_ready(session, self.url + "/ready"):
                waited_s = time.monotonic() - began
                cannot_listen = False
                # The logs are read only now and then, because that takes longer than a poll.
                if waited_s > next_report_s:
                    next_report_s += TIMING.launch_word
                    self._report_step(waited_s)
                    # Without its port, SGLang would go on running but never listen.
                    cannot_listen = self._found_port_taken()
                if self._exit_code is not None or cannot_listen:
                    raise EngineStartError(self._failure_message("did not start"))
                if waited_s > self._start_timeout_s:
                    failure = f"was not ready within {self._start_timeout_s:g} s"
                    raise EngineStartError(self._failure_message(failure))
                await asyncio.sleep(TIMING.launch_poll)

    def _report_step(self, waited_s: float) -> None:
        """Log that the server is still starting, with the newest log line that names a step of the start."""
        step = next(filter(None, map(step_in, reversed(self._log_lines()))), "")
        log.info("%s is still starting, %.0f s%s", self.name, waited_s, f": {step}" if step else "")

    async def stop(self) -> None:
        """End the server and all its processes; may be called again if it was cancelled."""
        if self._process is not None:
            await end_launched(self._process)
            self._process = None

    def _found_port_taken(self) -> bool:
        """Tell whether the log names a port that another process has taken."""
        return "address already in use" in self._cause().lower()

    def _failure_message(self, failure: str) -> str:
        """Return a message about a failure, such as "did not start", with the cause from the log."""
        cause = self._cause()
        if "No module named 'sglang'" in cause or "No module named sglang" in cause:
            return (
                f"{self.name} {failure}: {self._python} has no SGLang: set engine.python, or, "
                f"{install_command('engine')}"
            )
        if NO_GPU.search(cause):
            return (
                f"{self.name} {failure}: SGLang finds no GPU on this machine ({cause}): run the job on a "
                f"machine with a GPU, or set engine.device: cpu to try the job [{self.log_path}]"
            )
        status = "" if self._exit_code is None else f" (exit {self._exit_code})"
        return f"{self.name} {failure}{status}: {cause or 'the log names no cause'} [{self.log_path}]"

    async def ready(self) -> None:
        """Wait until the server is up.

        Raises EngineLostError if the server will never be up again, and EngineDownError if a run is stopping
        and the server is not up; see `cancel_restart`.
        """
        await self._settled.wait()
        if self.lost is not None:
            raise self.lost
        if not self.up:
            raise EngineDownError(f"{self.name} is not up, because a run is stopping")

    def report_hang(self, hang: Hang) -> None:
        """Report that the server hangs; `watch` then stops and restarts it."""
        if self._hang is not None and not self._hang.done():
            self._hang.set_result(hang)

    async def excuses(self, sent_at: float) -> bool:
        """Tell whether the server died after `sent_at` of a cause that safer arguments may cure.

        If so, no row is at fault.
        """
        return await self._recovery.excuses(sent_at)

    async def watch(self) -> None:
        """Restart the server whenever it ends; return when it is lost."""
        try:
            await self._watch()
        except Exception as failure:
            # Callers of `ready` must learn that the server will not be restarted any more.
            self.lost = EngineLostError(f"{self.name}: {type(failure).__name__}: {failure}")
            raise
        finally:
            self._settled.set()

    async def _watch(self) -> None:
        """Restart the server whenever it ends or hangs; return after too many quick deaths."""
        quick_deaths = 0
        self.up = True
        self._settled.set()
        up_since = time.monotonic()
        while True:
            hang = await self._wait_for_end()
            if hang is PLANNED:
                await self._drain()
                if self._is_restart_cancelled:
                    self._keep_flags()
                    continue
            self.up = False
            self._settled.clear()
            silent_s = 0.0 if hang is None else hang.silent_s
            # The silence before the hang was noticed does not count as life.
            lived_s = time.monotonic() - up_since - silent_s
            cause = await self._take_down(hang)
            # A planned restart changes the flags, like a recovery, and no row is to blame for it.
            self._recovery.record(is_healed=hang is PLANNED or self._choose_other_arguments())
            # The count of quick deaths changes only after a restart with the same arguments.
            if not self._recovery.is_healed:
                died_quickly = lived_s < TIMING.quick_death
                quick_deaths = quick_deaths + 1 if died_quickly else 1
            if quick_deaths > MOST_QUICK_DEATHS:
                self.lost = EngineLostError(f"{cause} (for the {quick_deaths}th time in a row)")
                self.incidents.append(Incident("lost", self.name, str(self.lost)))
                log.warning("%s: not started again", self.name)
                return
            await self._restart(quick_deaths)
            up_since = time.monotonic()

    async def _restart(self, quick_deaths: int) -> None:
        """Start the server again, after a pause that doubles with each quick death; log when it is back."""
        count = ""
        if not self._recovery.is_healed:
            count = f" ({quick_deaths} of at most {MOST_QUICK_DEATHS} times in a row)"
        log.warning("%s: started again%s", self.name, count)
        if quick_deaths > 1:
            pause_s = TIMING.first_restart * 2.0 ** (quick_deaths - 2)
            await asyncio.sleep(min(pause_s, TIMING.longest_restart))
        try:
            await self.start()
        except EngineStartError:
            # `_watch` sees that the process has ended, and logs the cause.
            await self.stop()
            return
        self.up = True
        self._settled.set()
        self.liveness.record(alive=True)
        self.incidents.append(Incident("back", self.name))
        log.warning("%s is back", self.name)

    async def _wait_for_end(self) -> Hang | None:
        """Wait until the server ends or hangs; return the hang, or None if the server ended."""
        if self._process is None:
            return None
        self._hang = hang = asyncio.get_running_loop().create_future()
        end = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({end, hang}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end.cancel()
        return hang.result() if hang.done() else None

    async def _take_down(self, hang: Hang | None) -> str:
        """Report a death or hang, mark the server as dead, and end it if it hangs; return the cause.

        A planned restart is treated as a hang, but not reported, because `_change_flags` has reported it.
        """
        cause = f"{self.name} {hang.why}" if hang else self._failure_message("died")
        if hang is not PLANNED:
            self.incidents.append(Incident("hangs" if hang else "died", self.name, cause))
            log.warning("%s", cause)
        self.liveness.record(alive=False)
        if hang:
            await self.stop()
        return cause


def _model_copy(model: str, *, revision: str | None, cache_dir: str) -> dict[str, str]:
    """Return the arguments of `local_copy` in launcher.py, for a copy of the model in `engine.cache_dir`.

    Raises EngineStartError if the files are not on this machine.
    """
    files = model_directory(model, revision).resolve()
    if not files.is_dir():
        raise EngineStartError(
            f"engine.cache_dir: the files of {model} are not on this machine",
            hint="download the model first (`hf download`), or remove engine.cache_dir",
        )
    name = model_identity(model).rpartition("/")[2]
    return {"source": str(files), "cache": cache_dir, "name": name}


async def launch(
    python: str,
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    command_prefix: Sequence[str] = (),
) -> asyncio.subprocess.Process:
    """Start a program with the launcher; return the launcher's process.

    `config` is described in launcher.py, and `python` is the interpreter of the program. Raises
    EngineStartError if the interpreter cannot be run.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command_prefix, python, str(LAUNCHER),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, env=environ,
        )  # fmt: skip
    except OSError as failure:
        raise EngineStartError(f"engine.python {python}: cannot be run: {failure}") from None
    # The configuration, which has the API key, goes through a pipe, because other users can read arguments.
    assert process.stdin is not None
    # A process that ends before it has read the configuration is noticed later, like any other death. For a
    # pipe that is closed already, uvloop raises RuntimeError.
    with contextlib.suppress(ConnectionError, RuntimeError):
        process.stdin.write(orjson.dumps(config) + b"\n")
        await process.stdin.drain()
    return process


async def end_launched(launcher: asyncio.subprocess.Process) -> None:
    """End a program that was started with `launch`, and all its processes."""
    assert launcher.stdin is not None
    # The launcher ends its program when this pipe is closed.
    launcher.stdin.close()
    await launcher.wait()


def _command_prefix(nodes: int) -> tuple[str, ...]:
    """Return the command prefix that runs a program on all machines of this Slurm job or Ray worker.

    Raises EngineStartError if Slurm has not allocated exactly `nodes` machines.
    """
    # Only a Ray worker whose engine spans several machines has this variable.
    if group := os.environ.get(GROUP):
        return sys.executable, str(RAY_RANKS), group
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "none")
    if allocated != str(nodes):
        raise EngineStartError(
            f"engine.nodes {nodes}: needs a Slurm job with {nodes} machines "
            f"(SLURM_JOB_NUM_NODES is {allocated})",
            hint="start it with `batchrun slurm` or `batchrun ray`",
        )
    return (
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none"),
    )  # fmt: skip


def to_argv(args: Mapping[str, Any]) -> list[str]:
    """Return arguments, such as `{mem-fraction-static: 0.8, enable-metrics: true}`, as an argument vector.

    Arguments with the value None or False are left out.
    """
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
    """Tell whether a server is ready. Status 404 counts too: older releases do not have the path `/ready`."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status in {200, 404}
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
