"""The exit code of a run and its reason, row by row."""

from typing import Any

import pytest

from batchrunner.core.errors import EngineLostError, JobError
from batchrunner.report.verdict import GO_ON, RunEnd, RunVerdict, verdict_of

STOP = RunVerdict(143, "SIGTERM")
SAMPLE = "the sample of an estimate is done; a run will not send the sampled rows again"
LEFT = "3 rows remain that no running worker has leased: run the same command again"
ADDED = "appeared in the input, or grew, during the run: run the same command again"
TOO_MANY = "rows of the run failed, more than limits.max_failed_rows tolerates"


@pytest.mark.parametrize(
    ("end", "exit_code", "reason"),
    [
        ({}, 0, "done"),
        ({"rows_failed": 2, "max_failed_rows": 2}, 0, "done"),
        ({"rows_failed": 3, "max_failed_rows": 2}, 3, f"done, but 3 {TOO_MANY}"),
        ({"rows_failed": 5, "max_failed_rows": 0.5}, 0, "done"),
        ({"rows_failed": 6, "max_failed_rows": 0.5}, 3, f"done, but 6 {TOO_MANY}"),
        ({"rows_failed": 1, "max_failed_rows": 1.0}, 0, "done"),
        ({"rows_left": 3}, 1, "stopped"),
        ({"rows_left": 3, "is_sample": True}, 1, SAMPLE),
        ({"rows_left": 3, "stop": STOP}, *STOP[:2]),
        ({"rows_left": 3, "is_sample": True, "stop": STOP}, *STOP[:2]),
        ({"rows_left": 3, "rows_unheld": 2}, 1, "stopped"),
        ({"rows_unheld": 3}, 1, LEFT),
        ({"rows_unheld": 3, "was_empty": True}, 1, LEFT),
        ({"rows_unheld": 3, "stop": STOP}, *STOP[:2]),
        ({"rows_held": 3}, 0, "done"),
        ({"rows_held": 3, "was_empty": True}, 0, "no rows can be leased: other workers have leased the rest"),
        ({"rows_held": 3, "was_empty": True, "rows_failed": 9}, 3, f"done, but 9 {TOO_MANY}"),
        ({"rows_held": 3, "stop": STOP}, 0, "done"),
        ({"stop": STOP}, 0, "done"),
        ({"added_files": ["b"]}, 1, f"b {ADDED}"),
        ({"added_files": ["b", "c", "d"]}, 1, f"b and 2 more {ADDED}"),
        ({"added_files": ["b"], "rows_failed": 9}, 1, f"b {ADDED}"),
        ({"added_files": ["b"], "rows_unheld": 3}, 1, LEFT),
        (
            {"rows_lost": 3},
            1,
            "3 rows of the run are missing from all result files: run the same command again",
        ),
        ({"failure": EngineLostError("lost"), "rows_left": 3, "stop": STOP}, 1, "lost"),
        ({"failure": JobError("wrong")}, 2, "wrong"),
    ],
)
def test_each_end(end: dict[str, Any], exit_code: int, reason: str) -> None:
    """The first of these counts: a failure, remaining rows, added files, too many failed rows."""
    facts: dict[str, Any] = {"rows_total": 10, "rows_failed": 0, "max_failed_rows": 0, **end}
    assert verdict_of(RunEnd(**facts))[:2] == (exit_code, reason)


def test_the_next_step_is_said_once() -> None:
    """A verdict has a next step unless its reason says one, however the reason is worded."""
    facts: dict[str, Any] = {"rows_total": 10, "rows_failed": 0, "max_failed_rows": 0, "rows_left": 3}
    stop = RunVerdict(143, "stopped against a deadline")
    assert verdict_of(RunEnd(**facts, stop=stop)).next_step == GO_ON
    lost = EngineLostError("the engine died again and again")
    assert verdict_of(RunEnd(**facts, failure=lost)).next_step == EngineLostError.advice
    hinted = EngineLostError("the engine died", hint="give it more memory")
    assert verdict_of(RunEnd(**facts, failure=hinted)).next_step == ""
    assert verdict_of(RunEnd(**{**facts, "rows_left": 0}, rows_unheld=3)).next_step == ""
