"""The script of a Slurm array: what it contains, and what bash makes of it."""

import functools
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Started, batchrun, eventually, job_of, write_job
from tests.support.server_thread import PATIENCE_S


def script_of(directory: Path, *options: object) -> str:
    """Return the script of a job in this directory."""
    done = batchrun("slurm", write_job(job_of(directory), directory), *options)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def stand_in(directory: Path, name: str, body: str) -> Path:
    """Write a program."""
    path = directory / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_script(tmp_path: Path) -> None:
    """It has the user's options, and the directory of its logs is there."""
    script = script_of(tmp_path, "--array", "0-15%4", "--", "--gpus-per-task", "2", "--qos=high")
    told = " ".join(line for line in script.splitlines() if line.startswith("#SBATCH"))
    for option in (
        "array=0-15%4", "gpus-per-task 2", "qos=high", "requeue", "open-mode=append", "ntasks=1",
        "signal=B:USR1@120", f"output={tmp_path}/run.slurm/%A_%a.log",
    ):  # fmt: skip
        assert f" --{option}" in told
    assert "--set limits.drain=100" in script
    assert (tmp_path / "run.slurm").is_dir()


def test_bash_reads_it_as_meant(tmp_path: Path) -> None:
    """Paths with spaces and values with quotes reach the command as they are, and `$` is not expanded."""
    here = tmp_path / 'a b "c" 100%'
    here.mkdir()
    program = stand_in(tmp_path, "program", f'printf "%s\\n" "$@" > {tmp_path}/arguments')
    value = """prompt.text=it's "$HOME" `id` {{ text }}"""
    preamble = f"set -e\nbatchrun=({program})"
    script = script_of(here, "--array", "0-1", "--set", value, "--preamble", preamble)
    subprocess.run(["bash", "-c", script], check=True, timeout=PATIENCE_S)
    told = (tmp_path / "arguments").read_text().splitlines()
    assert told[:2] == [str(here / "job.yaml"), "--join"]
    assert told[-2:] == ["--set", value]


@pytest.mark.parametrize(
    ("sent", "code", "requeued"),
    [
        ([signal.SIGUSR1], 138, ["requeue 7_3"]),
        ([signal.SIGTERM], 143, []),
        ([signal.SIGUSR1, signal.SIGTERM], 138, []),  # a scancel that comes later is obeyed
    ],
)
def test_signals_reach_the_task(
    tmp_path: Path, sent: list[signal.Signals], code: int, requeued: list[str]
) -> None:
    """The script passes each signal on, waits, ends with the task's exit code, and requeues only for 138."""
    program = stand_in(
        tmp_path,
        "program",
        f"""trap 'echo USR1 >> {tmp_path}/got; code=138' USR1
        trap 'echo TERM >> {tmp_path}/got; code=${{code:-143}}' TERM
        touch {tmp_path}/program-traps
        until [ "$(wc -l < {tmp_path}/got)" = {len(sent)} ]; do sleep 0.02; done
        exit $code""",
    )
    (tmp_path / "got").touch()
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/requeued')
    # the script waits only after it has set its own traps
    wait = f'wait() {{ : > {tmp_path}/script-traps; builtin wait "$@"; }}'
    preamble = f"export PATH={tmp_path}:$PATH\nbatchrun=({program})\n{wait}\n"
    script = script_of(tmp_path, "--array", "3", "--preamble", preamble)
    environ = {**os.environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    with subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE, text=True, env=environ) as process:
        eventually((tmp_path / "program-traps").exists)
        eventually((tmp_path / "script-traps").exists)
        for number, so_far in enumerate(sent, 1):
            process.send_signal(so_far)
            eventually(functools.partial(_has_lines, tmp_path / "got", number))
        assert Started(process).end() == code
    assert (tmp_path / "requeued").exists() == bool(requeued)
    assert [line for path in tmp_path.glob("requeued") for line in path.read_text().splitlines()] == requeued


def test_a_signal_while_the_task_begins(tmp_path: Path) -> None:
    """It ends the task as any other does, and not the script alone."""
    program = stand_in(tmp_path, "program", f"exec sleep {PATIENCE_S}")
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/requeued')
    signalled = "trap '[[ $BASH_COMMAND == task=* ]] && kill -USR1 $$' DEBUG"
    preamble = f"export PATH={tmp_path}:$PATH\nbatchrun=({program})\n{signalled}\n"
    script = script_of(tmp_path, "--array", "3", "--preamble", preamble)
    environ = {**os.environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    done = subprocess.run(["bash", "-c", script], check=False, env=environ, timeout=PATIENCE_S)
    assert done.returncode == 138
    assert (tmp_path / "requeued").read_text() == "requeue 7_3\n"


def _has_lines(path: Path, number: int) -> bool:
    return len(path.read_text().splitlines()) == number


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--array", "0-3", "--grace", "20"],
            "--grace 20: too short, because a task needs 20 s to write its last results",
        ),
        (["--array", "0-3", "--set", "output.path=/proc/x/y"], "/proc/x/y.slurm: cannot be created"),
        (["--array", "0-3", "--set", "prompt.text={{ '' }}"], "none of the first 10 rows can be sent"),
    ],
)
def test_what_cannot_be(tmp_path: Path, options: list[str], told: str) -> None:
    """A wrong option is one clear line and exit 2."""
    done = batchrun("slurm", write_job(job_of(tmp_path), tmp_path), *options)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
