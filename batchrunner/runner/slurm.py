"""Writes the script of a Slurm array for a job, for a person to read, change and submit."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from batchrunner.core.errors import EXIT_TIME_UP, JobError, OutputError
from batchrunner.job.load import load_job
from batchrunner.output.addresses import store_address
from batchrunner.runner.check import check

CLOSING_S = 20
"""Seconds at the end of the grace period, after the drain, for writing the last output part and shutting down
the engine."""

_SCRIPT = """\
#!/bin/bash
# Written by `batchrun slurm`: save it and change it, or pipe it into sbatch. Submitted again, it resumes.
#SBATCH {name}
# relative paths in the job start here
#SBATCH {directory}
# a restart goes on in the same log
#SBATCH {logs} --open-mode=append
# the tasks share the rows
#SBATCH {array}
# after a node's death or a preemption a task starts again, and resumes
#SBATCH --requeue
# the script is told so many seconds before the time limit
#SBATCH --signal=B:USR1@{grace_s}
#SBATCH --ntasks={nodes} --nodes={nodes} {sbatch}

batchrun=({batchrun})  # the preamble may set another
{preamble}
set +e  # whatever the preamble set: what follows looks at exit codes itself

trap 'early=USR1' USR1  # until the task has begun
trap 'early=TERM; ended=1' TERM
"${{batchrun[@]}}" {arguments} &
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


def array_script(
    job: str,
    *,
    array: str,
    sbatch: Sequence[str],
    overrides: Sequence[str],
    preamble: str,
    grace_s: int,
) -> str:
    """Return the script of array tasks that share a job's rows, and make the directory of their logs.

    `array` has the numbers of the tasks, as `sbatch --array` takes them. `sbatch` has further options for
    sbatch. `preamble` has shell lines that run before the job. Slurm signals a task `grace_s` seconds before
    the time limit. Raises JobError or OutputError.
    """
    if job == "-":
        raise JobError("-: each task of an array reads the job", hint="save the job in a file")
    if grace_s <= CLOSING_S:
        raise JobError(f"--grace {grace_s}: {CLOSING_S} s of it are needed for closing", hint="give more")
    checked = check(job, overrides)
    if checked.exit_code:
        raise JobError(f"{job}: {checked.verdict}")
    loaded = load_job(job, overrides=overrides)
    store = store_address(loaded.output.path)
    run = Path(store.name if store else loaded.output.path).expanduser().absolute()
    logs = run.with_name(f"{run.name}.slurm")  # sbatch does not make this directory
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"{logs}: cannot be made: {failure.strerror}") from None
    drain_s = grace_s - CLOSING_S
    sets = [word for text in (f"limits.drain={drain_s}", *overrides) for word in ("--set", text)]
    options = ["--join", *sets]
    pattern = str(logs).replace("%", "%%")  # sbatch replaces %A and %a by array and task
    return _SCRIPT.format(
        name=shlex.quote(f"--job-name={run.name}"),
        directory=shlex.quote(f"--chdir={Path.cwd()}"),
        logs=shlex.quote(f"--output={pattern}/%A_%a.log"),
        array=shlex.quote(f"--array={array}"),
        grace_s=grace_s,
        nodes=getattr(loaded.engine, "nodes", 1),
        sbatch=shlex.join(sbatch),
        batchrun=shlex.join([sys.executable, "-m", "batchrunner"]),
        preamble=preamble,
        arguments=shlex.join([str(Path(job).absolute()), *options]),
        drain_s=drain_s,
        time_up=EXIT_TIME_UP,
    )
