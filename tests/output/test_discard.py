"""Discards of a run that other workers may be writing."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchrunner.output import liveness
from batchrunner.output.discard import check_nobody_works
from batchrunner.output.holder import this_process
from batchrunner.output.run_dir import RunDir


def test_all_workers_of_other_machines_are_watched_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of lost machines prove dead in the same wait; a worker that left the run needs none."""
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        monkeypatch.setattr(liveness, "DEAD_AFTER_S", 0.0)

    for number in range(3):
        task = RunDir(tmp_path, f"join-{number}").task_directory
        task.mkdir(parents=True)
        holder = replace(this_process(), host="another", boot="another", token=f"token{number}")
        (task / "owner").write_text(json.dumps(asdict(holder)))
    (tmp_path / "tasks" / "join-gone").mkdir()
    (tmp_path / "tasks" / "join-gone" / "events.jsonl").touch()
    check_nobody_works(RunDir(tmp_path), sleep)
    assert len(sleeps) == 1
