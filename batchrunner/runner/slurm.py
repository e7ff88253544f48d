"""A job as a Slurm array: the script of its tasks, for a person to read and change, and its submission."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchrunner.core.errors import EXIT_TIME_UP, JobError, OutputError, SubmitError
from batchrunner.job.load import load_job
from batchrunner.output.addresses import store_address

CLOSING_S = 20
"""Seconds of the grace period kept for the last part and the end of the engine, after the drain."""
COMMENT_AT = 48

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
    place: str
    """The job's output path as commands take it: a directory, or a URI."""
    run: Path
    """The directory of the run; of one in an object store, a directory here, beside which the logs are."""
    array: str
    """Task numbers, as `sbatch --array` takes them."""
    sbatch: Sequence[str]
    """More options for the array, as sbatch takes them, such as `--gpus-per-task=1`."""
    overrides: Sequence[str]
    launches: bool
    """Whether a task starts an engine of its own."""
    grace_s: int
    """Seconds before the time limit at which Slurm signals a task that its time is nearly up."""
    preamble: str
    """Shell lines that come first: modules, a container."""
    no_python: bool
    """Whether the tasks refuse a job that runs Python functions, since the file may change."""

    @property
    def logs(self) -> Path:
        """Directory of the tasks' logs, beside the run; Slurm does not make it."""
        return self.run.with_name(f"{self.run.name}.slurm")

    def script(self) -> str:
        """Return the script of the tasks."""
        drain_s = self.grace_s - CLOSING_S
        options = [
            _option("open-mode=append", "a restart goes on in the same log"),
            _option(f"array={self.array}", "the tasks; submitted again, they resume"),
            _option("requeue", "after a node's death or a preemption a task starts again, and resumes"),
            _option(f"signal=B:USR1@{self.grace_s}", "the script is told so many seconds before the limit"),
            _option("ntasks=1", "an engine for each task of the array"),
            *self._cores_and_memory(),
            *(f"#SBATCH {shlex.quote(option)}" for option in self.sbatch),
        ]
        sets = [f"--set {shlex.quote(text)}" for text in (f"limits.drain={drain_s}", *self.overrides)]
        how = "--join --no-python" if self.no_python else "--join"
        command = " \\\n    ".join([f'"${{batchrun[@]}}" {shlex.quote(str(self.job))} {how}', *sets])
        return self._head("%A_%a", options) + _BODY.format(
            command=command, drain_s=drain_s, time_up=EXIT_TIME_UP
        )

    def merge_script(self, array_id: str) -> str:
        """Return the script that reports and merges when all tasks of this array have ended."""
        options = [
            _option(f"dependency=afterany:{array_id}", "however the tasks ended"),
            _option("kill-on-invalid-dep=yes"),
            *(f"#SBATCH {shlex.quote(option)}" for option in self.sbatch if option.startswith(_PLACES)),
        ]
        run = shlex.quote(self.place)
        head = self._head("%j-merge", options)
        return f'{head}\n"${{batchrun[@]}}" status {run}\n"${{batchrun[@]}}" merge {run}\n'

    def _cores_and_memory(self) -> list[str]:
        """Ask for the cores and the memory of an engine, by its GPUs, where no option says how many."""
        given = [option.partition("=")[0] for option in self.sbatch]
        by_gpu = any(name.startswith(("--gpus", "-G")) for name in given)
        cores, memory = (8, "64G") if self.launches or by_gpu else (4, "8G")
        found = []
        if not any(name.startswith(("--cpus", "-c", "--exclusive")) for name in given):
            found.append(_option(f"cpus-per-{'gpu' if by_gpu else 'task'}={cores}", "for engine and runner"))
        if not any(name.startswith(("--mem", "--exclusive")) for name in given):
            found.append(_option(f"mem{'-per-gpu' if by_gpu else ''}={memory}", "weights come through it"))
        return found

    def _head(self, log: str, options: Sequence[str]) -> str:
        """Return the lines before the commands; `log` is the name of the log as a pattern of Slurm."""
        logs = str(self.logs).replace("%", "%%")  # which begins a pattern
        batchrun = shlex.join([sys.executable, "-m", "batchrunner"])
        return "\n".join(
            [
                "#!/bin/bash",
                "# Written by `batchrun slurm`. To submit it, first make the directory of its logs:",
                f"#   mkdir -p {shlex.quote(str(self.logs))} && sbatch FILE",
                _option(f"job-name={self.run.name}"),
                _option(f"chdir={Path.cwd()}", "relative paths in the job start here"),
                _option(f"output={logs}/{log}.log"),
                *options,
                f"\nbatchrun=({batchrun})  # the preamble may set another",
                *(["", self.preamble.strip()] if self.preamble else []),
                "set +e  # whatever the preamble set: what follows looks at exit codes itself\n",
            ]
        )


_PLACES = ("--partition", "-p", "--account", "-A", "--qos", "-q", "--clusters", "-M", "--reservation")
"""Options of an array that the job after it needs as well."""


def plan_array(
    job: str,
    *,
    array: str,
    sbatch: Sequence[str],
    overrides: Sequence[str],
    preamble: str,
    no_python: bool,
    grace_s: int,
) -> SlurmArray:
    """Return the array of a job, with options that sbatch takes; raises JobError."""
    if job == "-":
        raise JobError("-: each task of an array reads the job", hint="write it into a file")
    if grace_s <= CLOSING_S:
        raise JobError(f"--grace {grace_s}: {CLOSING_S} s of it are needed for closing", hint="give more")
    loaded = load_job(job, overrides=overrides, no_python=no_python)
    store = store_address(loaded.output.path)
    run = Path(store.name if store else loaded.output.path).expanduser().absolute()
    return SlurmArray(
        job=Path(job).absolute(),
        place=str(store or run),
        run=run,
        array=array,
        sbatch=_whole_options(sbatch),
        overrides=overrides,
        launches=loaded.engine.kind in {"server", "gateway"},
        grace_s=grace_s,
        preamble=preamble,
        no_python=no_python,
    )


def _whole_options(words: Sequence[str]) -> list[str]:
    """Return options as `--name=value`, also where a value is a word of its own; raises JobError."""
    found: list[str] = []
    for word in words:
        if word.startswith("-"):
            found.append(word)
        elif found:
            found[-1] += ("=" if found[-1].startswith("--") else "") + word
        else:
            raise JobError(f"{word}: is no option of sbatch", hint="write -- --name=value")
    return found


def submit(array: SlurmArray, *, merge: bool) -> list[str]:
    """Submit the array and, with `merge`, a job after it; return lines for the user.

    Raises SubmitError, or OutputError where the directory of the logs cannot be made.
    """
    try:
        array.logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"{array.logs}: cannot be made: {failure.strerror}") from None
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
            f"sbatch: {failure.strerror}",
            hint="submit where Slurm is; without --submit the script is printed",
        ) from None
    if done.returncode:
        told = done.stderr.replace("sbatch: error: ", "").strip().splitlines()
        raise SubmitError(f"sbatch refused: {'; '.join(told) or f'exit {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]  # ID;CLUSTER where there are several


def _option(text: str, comment: str = "") -> str:
    """Return the line of an option of sbatch in a script."""
    line = f"#SBATCH {shlex.quote(f'--{text}')}"
    return f"{line:{COMMENT_AT}}# {comment}" if comment else line
