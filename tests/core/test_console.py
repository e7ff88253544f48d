"""Whatever data has in it, what is printed is lines that a terminal shows and does not obey."""

import json
import unicodedata
from pathlib import Path

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
