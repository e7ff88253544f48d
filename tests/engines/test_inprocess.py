"""Ctrl-C and SIGTERM while SGLang's engine loads in this process: one line, and no process is left.

SGLang is a stand-in here, whose engine starts a process and waits for it.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from batchrunner.core.child_processes import STOP_SIGNALS
from tests.conftest import _COMMAND, eventually, job_of, started_python, write_job
from tests.support.engine_processes import deaf_to

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = """
import multiprocessing, os, sys, time

__version__ = "0.5.23"

def scheduler(mark):
    with open(mark + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(mark + ".new", mark)
    time.sleep(600)

class Engine:
    def __init__(self, **args):
        process = multiprocessing.get_context("spawn").Process(target=scheduler, args=({mark!r},))
        process.start()
        process.join()
        raise RuntimeError("the scheduler died")
"""
IMPORTING = """
import time
with open({mark!r}, "w") as file:
    file.write("0")
time.sleep(600)
"""


def stand_in(directory: Path, text: str) -> tuple[Path, Path]:
    """Write a package `sglang` and a job for it; return the job file, and the file that its engine writes."""
    home, mark = directory / "site", directory / "mark"
    below = home / "sglang" / "srt" / "entrypoints" / "openai"
    below.mkdir(parents=True)
    (below / "serving_chat.py").write_text("OpenAIServingChat = None\n")
    (home / "sglang" / "__init__.py").write_text(text.replace("{mark!r}", repr(str(mark))))
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    engine = {"kind": "inprocess", "model": str(directory / "model"), "device": "cpu"}
    return write_job(job_of(directory, engine), directory), mark


@pytest.mark.parametrize("text", [ENGINE, IMPORTING], ids=["loads", "imports"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_loads(tmp_path: Path, text: str, number: signal.Signals, code: int) -> None:
    """The command ends with one line, whatever SGLang does, and takes the engine's process with it."""
    job, mark = stand_in(tmp_path, text)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]])
    with started_python("-c", _COMMAND, job, PYTHONPATH=path) as process:
        eventually(mark.exists)
        process.process.send_signal(number)
        assert process.end() == code
    told = [line for line in process.lines if "interrupted" in line]
    assert told == ["batchrun: interrupted while the engine was starting\n"]
    _has_ended(mark)


def test_two_interrupts_while_it_loads(tmp_path: Path) -> None:
    """The second one waits for nothing, and leaves no process either."""
    job, mark = stand_in(tmp_path, ENGINE)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]])
    with started_python("-c", _COMMAND, job, PYTHONPATH=path) as process:
        eventually(mark.exists)
        process.process.send_signal(signal.SIGINT)
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
    _has_ended(mark)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_engines_own_process(tmp_path: Path, number: signal.Signals) -> None:
    """Slurm and `timeout` send a signal to all processes; the engine leaves it to the run, and goes on."""
    job, mark = stand_in(tmp_path, ENGINE)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ["PYTHONPATH"]])
    with started_python("-c", _COMMAND, job, PYTHONPATH=path) as process:
        eventually(mark.exists)
        engine = int(mark.read_text())
        assert number in deaf_to(engine)
        os.kill(engine, number)
        os.kill(engine, 0)
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 143
    _has_ended(mark)


def _has_ended(mark: Path) -> None:
    number = int(mark.read_text())

    def is_gone() -> bool:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        return False

    if number:
        eventually(is_gone)
