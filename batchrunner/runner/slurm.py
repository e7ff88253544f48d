"""Writes a Slurm script that runs a job as an array of tasks, for a person to read, change and submit."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from batchrunner.core.errors import EXIT_TIME_UP, JobError, OutputError
from batchrunner.job.load import load_job
from batchrunner.output.addresses import store_address
from batchrunner.runner.check import check

CLOSING_S = 20
"""Seconds before Slurm's time limit in which a task writes its last results and shuts its engine down."""

_SCRIPT = """\
#!/bin/bash
# Written by `batchrun slurm`: save and change this script, or pipe it into sbatch. Submit it again to resume.
#SBATCH {name}
# relative paths in the job are relative to this directory
#SBATCH {directory}
# a task that is started again appends to the same log
#SBATCH {logs} --open-mode=append
# the tasks share the rows
#SBATCH {array}
# after a preemption or the death of its node, a task starts again and resumes
#SBATCH --requeue
# the script gets SIGUSR1 this many seconds before the time limit
#SBATCH --signal=B:USR1@{grace_s}
#SBATCH --ntasks={nodes} --nodes={nodes} {sbatch}

batchrun=({batchrun})  # the command; the preamble may change it
{preamble}
set +e  # in case the preamble ran `set -e`: the following lines check exit codes themselves

trap 'early=USR1' USR1  # until the task has begun, signals are only recorded
trap 'early=TERM; ended=1' TERM
"${{batchrun[@]}}" {arguments} &
task=$!
trap 'kill -USR1 "$task"' USR1  # the time limit is near: rows in flight get {drain_s} s to end
trap 'kill -TERM "$task"; ended=1' TERM  # scancel, preemption, the time limit itself
if [ -n "$early" ]; then sleep 2; kill "-$early" "$task"; fi  # a process that just begins may miss it
while kill -0 "$task" 2>/dev/null; do wait "$task"; done  # a signal ends `wait` while the task still runs
wait "$task"
status=$?
if [ "$status" -eq {time_up} ] && [ -z "$ended" ]; then  # rows remain: queue the task again
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
    """Return the script of array tasks that share a job's rows, and create the directory of their logs.

    `array` has the numbers of the tasks in the syntax of `sbatch --array`. `sbatch` has further options for
    sbatch. `preamble` has shell lines that run before the job. Slurm signals a task `grace_s` seconds before
    the time limit. Raises JobError or OutputError.
    """
    if job == "-":
        raise JobError(
            "-: the job cannot be read from standard input, because each task of the array reads it",
            hint="save the job in a file",
        )
    if grace_s <= CLOSING_S:
        raise JobError(
            f"--grace {grace_s}: too short, because a task needs {CLOSING_S} s to write its last results",
            hint=f"give more than {CLOSING_S} s",
        )
    checked = check(job, overrides)
    if checked.exit_code:
        raise JobError(f"{job}: {checked.verdict}")
    loaded = load_job(job, overrides=overrides)
    store = store_address(loaded.output.path)
    run = Path(store.name if store else loaded.output.path).expanduser().absolute()
    logs = run.with_name(f"{run.name}.slurm")  # sbatch does not create this directory
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"{logs}: cannot be created: {failure.strerror}") from None
    drain_s = grace_s - CLOSING_S
    options = ["--join"]
    for override in (f"limits.drain={drain_s}", *overrides):
        options += ["--set", override]
    # sbatch replaces %A with the array's job number, and %a with the task's number.
    pattern = str(logs).replace("%", "%%")
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
