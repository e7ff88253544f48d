"""With `--json` every end of the command is one JSON document that says what happened and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchrunner.core import errors
from tests.conftest import ROOT, batchrun, job_of, write_job
from tests.support.server_thread import PATIENCE_S

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.BatchrunError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_error_says_what_to_do(kind: type[errors.BatchrunError]) -> None:
    """An error without a hint of its own has that of its class; the printed line is what it was."""
    plain, told = kind("it is wrong"), kind("it is wrong", hint="mend it")
    assert len(plain.hint.split()) > 2
    assert (str(plain), str(told)) == ("it is wrong", "it is wrong: mend it")
    assert (told.message, told.hint) == ("it is wrong", "mend it")
    assert str(kind("mend it first", hint="mend it")) == "mend it first"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"prompt": {"user": "{{ txt }}"}}, "did you mean 'text'?"),
        ({"input": {"columns": ["txt"]}}, "did you mean 'text'?"),
        ({"sampling": {"temperature": "hot"}}, errors.JobError.advice),
        (
            {"engine": {"kind": "attach", "urls": ["http://127.0.0.1:9"]}},
            "start the server, or correct engine.urls",
        ),
    ],
)
def test_hints_of_a_job(tmp_path: Path, change: dict[str, Any], hint: str) -> None:
    """Whatever part of the job is wrong, the hint stands apart, and the line says it where it ever did."""
    failed = batchrun(write_job(job_of(tmp_path, **change), tmp_path), "--json")
    error = json.loads(failed.stdout)["error"]
    assert (failed.exit_code, error["hint"]) == (2, hint)
    assert (hint in failed.stderr) == (hint != errors.JobError.advice)


@pytest.mark.parametrize(
    ("event", "kind", "code"),
    [
        ("raise LookupError('no such thing')", "LookupError", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "BatchrunError", 130),
    ],
)
def test_what_nobody_foresaw(tmp_path: Path, event: str, kind: str, code: int) -> None:
    """An unforeseen error and a Ctrl-C are JSON too, also while the command has other work than a run."""
    script = (
        "import os, signal, sys, time, batchrunner.cli, batchrunner.runner.check as check\n"
        f"def fails(*_, **__): {event}\n"
        "check.check = fails\n"
        "sys.argv = ['batchrun', 'check', 'job.yaml', '--json']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "batchrunner.cli.main()\n"
    )
    environ = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environ,
    )
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == code
    assert found["error"]["type"] == kind
    (line,) = done.stderr.strip().splitlines()  # typer has an empty line before what follows an EOFError
    assert line.startswith(f"batchrun: {found['error']['message']}")
    assert "run the same command again" in found["error"]["hint"]
    assert len(list(tmp_path.glob("batchrun-error-*"))) == (code == 1)
