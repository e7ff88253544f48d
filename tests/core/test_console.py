"""Whatever data has in it, what is printed is lines that a terminal shows and does not obey."""

import json
import unicodedata
from pathlib import Path

import pytest

from batchrunner.core.console import background_line, duration
from tests.conftest import batchrun, job_of, results_of, write_job, write_rows

EVIL = "\x1b]0;mine\x07\x1b[8m\x9b\r\x7f\u202eevil\u2028\nall is well"
SHOWN = r"\u001b]0;mine\u0007\u001b[8m\u009b\r\u007f\u202eevil\u2028\nall is well"
HOOK = """
def prompt(row):
    print(row["title"])
    if row["id"] % 2:
        raise ValueError(row["title"])
    return "good " + row["title"]
"""


def test_nothing_that_data_holds_is_obeyed(tmp_path: Path) -> None:
    """Prompts, errors, prints and usage are shown escaped in each command; results keep what they are."""
    (tmp_path / "evil_hook.py").write_text(HOOK)
    write_rows(tmp_path / "input.parquet", 4, title=[EVIL] * 4)
    job = job_of(
        tmp_path, input={"columns": ["title"]}, limits={"max_failed_rows": 4},
        prompt={"python": "evil_hook:prompt"}, python_path=[str(tmp_path)],
    )  # fmt: skip
    file, run = write_job(job, tmp_path), tmp_path / "run"
    checked, ran = batchrun("check", file), batchrun(file)
    told = [
        checked, ran, batchrun("status", run), batchrun("merge", run), batchrun("status", EVIL),
        batchrun("status", "--json", run), batchrun("run", f"--{EVIL}"), batchrun("report", run, EVIL),
    ]  # fmt: skip
    told += [
        batchrun(
            "check", file, "--set", f"prompt={{{name}: '{{{{ title }}}}'}}", "--set", f"output.path={run}2"
        )
        for name in ("user", "text")
    ]
    for result in told:
        controls = {each for each in result.output if unicodedata.category(each) in {"Cc", "Zl"}}
        assert controls <= {"\n"}
        assert "\u202e" not in result.output
        assert "all is well" not in result.output.splitlines()
    for shown in (f"good {SHOWN}", f'"content": "{SHOWN}"', f"\n{SHOWN}\n"):
        assert any(shown in result.stdout for result in told)
    for result in told[:4]:
        assert f"ValueError: {SHOWN.partition('b[8m')[0]}" in result.output
    failures = json.loads(told[5].stdout)["failures"]
    assert EVIL.partition("\x9b")[0] in failures[0]["example"]
    assert {row["title"] for row in results_of(job)} == {EVIL}
    page = (run / "report.html").read_text() if batchrun("report", run).exit_code == 0 else ""
    assert r"\u202eevil" in page
    assert not set(page) & set("\x1b\x07\x9b\u202e\u2028")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7_530, "2 h 5 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """A duration has the two largest of its units."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("rows", "tokens", "end"),
    [
        (0, 0, ""),
        (1, 12, ", 1 row preempted (12 tokens lost)"),
        (31, 1204, ", 31 rows preempted (1,204 tokens lost)"),
    ],
)
def test_the_line_of_a_background_run(rows: int, tokens: int, end: str) -> None:
    """Preempted rows are named only if there are any."""
    background = {"our_share": 0.614, "users_share": 0.12, "rows_given_back": rows, "tokens_lost": tokens}
    assert background_line(background) == f"engine: 61% of its time for this run, 12% for its users{end}"
