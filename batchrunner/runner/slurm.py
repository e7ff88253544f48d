"""A job as a Slurm array: the script of its tasks, for a person to read and change, and its submission."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrunner.core.errors import EXIT_TIME_UP, JobError, OutputError, SubmitError
from batchrunner.job.load import load_job
from batchrunner.output.files import refuse_uri
from batchrunner.output.stores.addresses import store_address

CLOSING_S = 20
"""Seconds of the grace period kept for the last part and the end of the engine, after the drain."""
CPUS_PER_GPU, CPUS_WITHOUT_GPU = 8, 4
"""CPU cores of a task, unless the user says how many: SGLang has a few busy processes for each GPU."""
MEMORY_PER_GPU_G, MEMORY_WITHOUT_GPU_G = 64, 8
"""Main memory of a task in GiB, unless the user says how much: an engine loads its weights through it."""
COMMENT_AT = 48
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::[1-9]\d*)?)?")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
"""Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
_CPU_OPTIONS = {"cpus-per-task", "c", "cpus-per-gpu", "exclusive"}
_MEMORY_OPTIONS = {"mem", "mem-per-cpu", "mem-per-gpu", "exclusive"}
_GPU_OPTIONS = {"gpus-per-task", "gpus-per-node", "gpus", "G", "gres"}
_PLAIN = re.compile(r"[\w./:,=@%+-]+")

_BODY = """
trap 'early=USR1' USR1  # until the task has begun
trap 'early=TERM; ended=1' TERM
{command} &
task=$!
trap 'kill -USR1 "$task"' USR1  # time is nearly up: rows in flight get {drain_s} s to end
trap 'kill -TERM "$task"; ended=1' TERM  # scancel, preemption, the time limit itself
if [ -n "$early" ]; then sleep 2; kill "-$early" "$task"; fi  # a process that just begins may miss it
while kill -0 "$task" 2>/dev/null; do wait "$task"; done  # a signal ends a `wait` before the task's end
wait "$task"
status=$?
if [ "$status" -eq {time_up} ] && [ -z "$ended" ]; then  # rows are left: queue again
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmArray:
    """Tasks that share a job's input and output path. All paths are absolute."""

    job: Path
    run: Path
    """The job's output path."""
    directory: Path
    """Relative paths in the job start here."""
    array: str
    """Task numbers, as `sbatch --array` takes them."""
    overrides: Sequence[str] = ()
    partition: str | None = None
    account: str | None = None
    gpus_per_task: str | None = None
    cpus_per_task: str | None = None
    mem: str | None = None
    """Main memory of a task; None, as for `cpus_per_task`, for a value by its GPUs."""
    launches: bool = True
    """Whether a task starts an engine of its own."""
    time: str | None = None
    sbatch: Sequence[str] = ()
    """More options for the array, such as `qos=high`."""
    grace_s: int = 120
    """Seconds before the time limit at which Slurm signals a task that its time is nearly up."""
    preamble: str = ""
    """Shell lines that come first: modules, a container."""
    no_python: bool = False
    """Whether the tasks refuse a job that runs Python functions, since the file may change."""
    uri: str = ""
    """URI of a run in an object store; `run` is then a directory here, beside which the logs are."""

    def __post_init__(self) -> None:
        """Refuse arguments that sbatch accepts or refuses without a clear reason; raises JobError."""
        _check_array(self.array)
        if self.grace_s <= CLOSING_S:
            raise JobError(
                f"--grace {self.grace_s}: {CLOSING_S} s of it are needed for closing", hint="give more"
            )
        for name, value, _ in (("time", self.time, ""), *_more(self.sbatch)):
            if name in {"time", "t"} and value:
                _check_time(value, self.grace_s)

    @property
    def place(self) -> str:
        """The run as commands take it: its directory, or its URI."""
        return self.uri or str(self.run)

    @property
    def logs(self) -> Path:
        """Directory of the tasks' logs, beside the run; Slurm does not make it."""
        return self.run.with_name(f"{self.run.name}.slurm")

    def script(self) -> str:
        """Return the script of the tasks."""
        drain_s = self.grace_s - CLOSING_S
        how = "--join --no-python" if self.no_python else "--join"
        sets = [f"--set {shlex.quote(text)}" for text in (f"limits.drain={drain_s}", *self.overrides)]
        directives = [
            self._log_to("%A_%a"),
            ("open-mode", "append", "a restart goes on in the same log"),
            ("array", self.array, "the tasks; submitted again, they resume"),
            ("requeue", "", "after a node's death or a preemption a task starts again, and resumes"),
            ("signal", f"B:USR1@{self.grace_s}", "this script is told so many seconds before the time limit"),
            ("ntasks", "1", "an engine for each task of the array"),
            ("cpus-per-task", self._cpus(), "for the engine and the runner"),
            ("mem", self._memory(), "main memory: the engine loads its weights through it"),
            ("gpus-per-task", self.gpus_per_task, "Slurm sets CUDA_VISIBLE_DEVICES, and the engine obeys"),
            ("time", self.time, "a task that needs longer is requeued"),
            *_more(self.sbatch),
        ]
        command = [f'"${{batchrun[@]}}" {shlex.quote(str(self.job))} {how}', *sets]
        return self._head(directives) + _BODY.format(
            command=" \\\n    ".join(command), drain_s=drain_s, time_up=EXIT_TIME_UP
        )

    def merge_script(self, array_id: str) -> str:
        """Return the script that reports and merges when all tasks of this array have ended."""
        directives = [
            self._log_to("%j-merge"),
            ("dependency", f"afterany:{array_id}", "however the tasks ended"),
            ("kill-on-invalid-dep", "yes", ""),
        ]
        run = shlex.quote(self.place)
        return self._head(directives) + f'\n"${{batchrun[@]}}" status {run}\n"${{batchrun[@]}}" merge {run}\n'

    def _gpus(self) -> int:
        """Return the GPUs of a task; a launched engine has one at least."""
        given = [("gpus-per-task", self.gpus_per_task or "", ""), *_more(self.sbatch)]
        texts = (value for name, value, _ in given if name in _GPU_OPTIONS)
        counts = [int(found[1]) for text in texts for found in re.finditer(r"(?:^|:)(\d+)(?:$|[,(])", text)]
        return max(sum(counts), int(self.launches))

    def _cpus(self) -> str | None:
        """Return the cores of a task; None where another option says how many."""
        if self.cpus_per_task or _CPU_OPTIONS & {name for name, _, _ in _more(self.sbatch)}:
            return self.cpus_per_task
        return str(CPUS_PER_GPU * self._gpus() or CPUS_WITHOUT_GPU)

    def _memory(self) -> str | None:
        """Return the main memory of a task; None where another option says how much."""
        if self.mem or _MEMORY_OPTIONS & {name for name, _, _ in _more(self.sbatch)}:
            return self.mem
        return f"{MEMORY_PER_GPU_G * self._gpus() or MEMORY_WITHOUT_GPU_G}G"

    def _log_to(self, name: str) -> tuple[str, str, str]:
        # Slurm takes % for the start of a pattern
        return ("output", str(self.logs).replace("%", "%%") + f"/{name}.log", "")

    def _head(self, directives: Sequence[tuple[str, str | None, str]]) -> str:
        common = [
            ("job-name", self.run.name, ""),
            ("chdir", str(self.directory), "relative paths in the job start here"),
            ("partition", self.partition, ""),
            ("account", self.account, ""),
        ]
        python = shlex.join([sys.executable, "-m", "batchrunner"])
        return "\n".join(
            [
                "#!/bin/bash",
                "# Written by `batchrun slurm`. To submit it, first make the directory of its logs:",
                f"#   mkdir -p {shlex.quote(str(self.logs))} && sbatch FILE",
                *(_directive(n, v, why) for n, v, why in (*common, *directives) if v is not None),
                f"\nbatchrun=({python})  # the preamble may set another, in a container say",
                *(["", self.preamble.strip()] if self.preamble else []),
                "set +e  # whatever the preamble set: what follows looks at exit codes itself\n",
            ]
        )


def plan_array(
    job: str, *, overrides: Sequence[str], preamble: str, no_python: bool, **options: Any
) -> SlurmArray:
    """Return the array of a job; `options` are other fields of SlurmArray. Raises JobError."""
    if job == "-":
        raise JobError("-: each task of an array reads the job", hint="write it into a file")
    loaded = load_job(job, overrides=overrides, no_python=no_python)
    store = store_address(loaded.output.path)
    return SlurmArray(
        job=Path(job).absolute(),
        run=Path(store.name if store else loaded.output.path).expanduser().absolute(),
        uri=str(store or ""),
        directory=Path.cwd(),
        overrides=overrides,
        preamble=_text_or_file(preamble),
        no_python=no_python,
        launches=loaded.engine.kind in {"server", "gateway"},
        **options,
    )


def save(array: SlurmArray, path: str) -> None:
    """Write the script into a file; raises OutputError."""
    refuse_uri(path, path)
    try:
        Path(path).write_text(array.script(), encoding="utf-8")
    except OSError as failure:
        raise OutputError(f"{path}: cannot be written: {failure.strerror}") from None


def make_logs(array: SlurmArray) -> None:
    """Make the directory of the logs; raises OutputError."""
    try:
        array.logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"{array.logs}: cannot be made: {failure.strerror}") from None


def submit(array: SlurmArray, *, merge: bool) -> list[str]:
    """Submit the array and, with `merge`, a job after it; return lines for the user. Raises SubmitError."""
    array_id = _sbatch(array.script())
    lines = [f"array {array_id} submitted; logs: {array.logs}; see `batchrun status {array.place}`"]
    if merge:
        lines.append(f"job {_sbatch(array.merge_script(array_id))} will report and merge when it has ended")
    return lines


def _sbatch(script: str) -> str:
    """Submit a script; return the job's ID."""
    command = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except OSError as failure:
        raise SubmitError(
            f"sbatch: {failure.strerror}", hint="submit where Slurm is, or write the script with -o FILE"
        ) from None
    if done.returncode:
        told = done.stderr.replace("sbatch: error: ", "").strip().splitlines()
        raise SubmitError(f"sbatch refused: {'; '.join(told) or f'exit {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]  # ID;CLUSTER where there are several


def _check_array(text: str) -> None:
    numbers, percent, most = text.partition("%")
    ranges = [_RANGE.fullmatch(part) for part in numbers.split(",")]
    if not all(found and int(found[1]) <= int(found[2] or found[1]) for found in ranges) or (
        percent and not re.fullmatch(r"[1-9]\d*", most)
    ):
        raise JobError(f"--array {text}", hint="write it as 0-15, 1,3,7 or 0-15%4 (four at once)")


def _check_time(text: str, grace_s: int) -> None:
    """Raise JobError where a time limit has no form of Slurm's, or leaves a task no time to work."""
    if text.upper() in {"UNLIMITED", "INFINITE"}:
        return
    found = _TIME.fullmatch(text)
    if not found:
        raise JobError(f"--time {text}", hint="write it as 90 (minutes), 4:00:00 or 1-12:00:00")
    days, *given = (int(number) if number else 0 for number in found.groups())
    if found["days"] is not None or found["third"] is not None:
        hours, minutes, seconds = given
    else:
        hours, (minutes, seconds) = 0, given[:2]
    limit_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if 0 < limit_s <= grace_s:  # 0 is no limit
        raise JobError(
            f"--time {text}: the last {grace_s} s of it (--grace) are for the end of a task, so that none "
            "would ever do a row",
            hint="give more time, or less grace",
        )


def _more(options: Sequence[str]) -> list[tuple[str, str, str]]:
    split = (option.lstrip("-").partition("=") for option in options)
    return [(name, value, "") for name, _, value in split]


def _directive(name: str, value: str, comment: str) -> str:
    line = f"#SBATCH --{name}" + (f"={_quoted(name, value)}" if value else "")
    return f"{line:{COMMENT_AT}}# {comment}" if comment else line


def _quoted(name: str, value: str) -> str:
    """Write a value as sbatch reads it in a script; raises JobError."""
    if not value.isprintable():
        raise JobError(f"--{name} {value!r}: cannot be written on one line of a script")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if _PLAIN.fullmatch(value) else f'"{escaped}"'


def _text_or_file(preamble: str) -> str:
    if not preamble or (re.search(r"\s", preamble) and not os.path.isfile(preamble)):  # noqa: PTH113 - never raises
        return preamble
    try:
        return Path(preamble).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise JobError(f"--preamble {preamble}: cannot be read: {failure}") from None
