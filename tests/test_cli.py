"""The command: what it prints, and to where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from tests.conftest import ROOT, batchrun, ended, job_of, printed, report_of, results_of, rows_in, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.server_thread import PATIENCE_S


def test_what_a_person_reads(tmp_path: Path, server: FakeSGLang) -> None:
    """At the end stands how many rows went well, how many not and why, and where the results are.

    The path is all that stands on standard output, and with `--json` the report.
    """
    server.script = lambda sent: "bad schema" if sent.prompt == "row 7" else "answer"
    job = job_of(tmp_path, server)
    result = batchrun(write_job(job, tmp_path))
    assert result.exit_code == 3
    assert "9 of 10 rows ok, 1 failed" in result.stderr
    assert "failed: 1 row: 400: Failed to compile json grammar" in result.stderr
    assert f"results: {tmp_path / 'run'}/parts" in result.stderr
    assert result.stdout == f"{tmp_path / 'run'}/parts\n"
    again = batchrun(write_job(job, tmp_path), "--fresh", "--json")
    assert json.loads(again.stdout) == report_of(job)


def test_quiet_says_nothing(tmp_path: Path) -> None:
    """`--quiet` leaves a log empty where all went well."""
    result = batchrun(write_job(job_of(tmp_path), tmp_path), "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["status", "report", "merge"])
def test_a_job_is_no_run(tmp_path: Path, command: str) -> None:
    """A job file in a run's place is refused in one line."""
    refused = batchrun(command, write_job(job_of(tmp_path), tmp_path))
    assert refused.exit_code == 2
    assert "not a run's output path" in refused.stderr


def test_notes_are_shown_where_they_are_asked_for(tmp_path: Path, server: FakeSGLang) -> None:
    """`-v` says where prompts are tokenized; without it nobody has to read that."""
    file = write_job(job_of(tmp_path, server), tmp_path)
    assert "the engine tokenizes the prompts" not in batchrun(file).stderr
    assert "the engine tokenizes the prompts" in batchrun("-v", file, "--fresh").stderr


def test_version() -> None:
    """`--version` says which batchrunner this is."""
    assert batchrun("--version").stdout.startswith("batchrun 0.")


def test_the_help_is_whole() -> None:
    """It cuts no command's line, each command has an example, and `-h` is `--help`."""
    shown = batchrun("--help").stdout
    assert batchrun("-h").stdout == shown
    listed = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
    for line in listed:
        name = line.split()[0]
        example = "Example: batchrun " + ("" if name == "run" else f"{name} ")
        assert example in batchrun(name, "-h").stdout


def batchrun_with(stdin: str, *args: object, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in a directory, with a text as standard input."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ended(sys.executable, "-m", "batchrunner", *args, input=stdin, cwd=directory, env=environ)


def test_a_job_from_standard_input(tmp_path: Path) -> None:
    """`batchrun -` runs, checks and resumes a job that another program writes."""
    job = job_of(tmp_path)
    text = yaml.safe_dump(job)
    checked = batchrun_with(text, "check", "-", "--json", directory=tmp_path)
    assert json.loads(checked.stdout)["rows_to_do"] == 10
    done = batchrun_with(text, "-", "--limit", 4, directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'run'}/parts\n"), done.stderr
    assert batchrun_with(text, "--quiet", "-", directory=tmp_path).returncode == 0
    assert len(results_of(job)) == 10


@pytest.mark.parametrize(
    ("text", "command", "told"),
    [
        ("a: [", ["-"], "standard input: line 1: not valid YAML"),
        ("inptu: {}", ["-"], "unknown key 'inptu': did you mean 'input'?"),
        ("window: 5", ["slurm", "-", "--array", "0-1"], "save the job in a file"),
    ],
)
def test_a_bad_job_from_standard_input(text: str, command: list[str], told: str, tmp_path: Path) -> None:
    """The line says where the job came from; what reads the file later cannot have it from there."""
    refused = batchrun_with(text, *command, directory=tmp_path)
    assert refused.returncode == 2
    assert told in refused.stderr


def test_limit(tmp_path: Path) -> None:
    """`--limit` is `--set input.limit`, and the last of both."""
    job = job_of(tmp_path, input={"limit": 2})
    file = write_job(job, tmp_path)
    assert printed("check", file, "--limit", 5, "--set", "input.limit=3")["rows_total"] == 5
    assert batchrun("--limit", 3, file).exit_code == 0
    assert len(results_of(job)) == 3
    assert batchrun(file, "--limit", 0).exit_code == 2


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["Status", "out"], "status"),
        (["--json", "chekc", "job.yaml"], "check"),
        (["advice", "out"], "advise"),
    ],
)
def test_a_misspelt_command(words: list[str], near: str) -> None:
    """It is not taken for a job file."""
    refused = batchrun(*words)
    assert refused.exit_code == 2
    assert f"no such command or job file: did you mean '{near}'?" in refused.stderr


def test_a_job_named_like_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that exists is the job, and a value of an option is no command."""
    monkeypatch.chdir(tmp_path)
    write_job(job_of(tmp_path), tmp_path).rename(tmp_path / "statu")
    assert batchrun("--set", "limits.hang=70", "statu").exit_code == 0


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["nothing.yaml"], "JobError"),
        (["merge", "nowhere"], "OutputError"),
        (["advise", "nothing.log"], "InputError"),
        (["check"], "MissingParameter"),
        (["--nonsense", "status", "nowhere"], "NoSuchOption"),
    ],
)
def test_an_error_as_json(words: list[str], kind: str) -> None:
    """A script that reads JSON also reads why there is no result; a person reads the same line as ever."""
    failed = batchrun(*words, "--json")
    found = json.loads(failed.stdout)
    assert failed.exit_code == found["exit_code"] == 2
    assert found["error"].keys() == {"type", "message", "hint"}
    assert (found["error"]["type"], bool(found["error"]["message"])) == (kind, True)
    assert found["error"]["message"] in failed.stderr
    assert failed.stderr.count("\n") == 1
    without = batchrun(*words)
    assert (without.exit_code, without.stdout, without.stderr) == (2, "", failed.stderr)


def test_json_of_other_commands(tmp_path: Path) -> None:
    """A script reads where the rows, the page and the script went, and what a job may be."""
    run, file = tmp_path / "run", write_job(job_of(tmp_path), tmp_path)
    assert batchrun(file).exit_code == 0

    for target, words in [(run / "merged", ()), (tmp_path / "all.csv", (tmp_path / "all.csv",))]:
        merged = printed("merge", run, *words)
        assert (merged["path"], merged["rows"], merged["rows_missing"]) == (str(target), 10, 0)
    assert printed("merge", run, tmp_path / "all.csv", code=2)["exit_code"] == 2
    assert Path(printed("report", run)["page"]).exists()
    assert printed("slurm", file, "--array", "0-1")["script"].startswith("#!/bin/bash")
    schema = json.loads(batchrun("schema").stdout)
    assert schema["title"] == "Job"
    engine = {**schema["properties"]["engine"], "$defs": schema["$defs"]}
    for good in ("simulated", "Qwen/Qwen3-8B", ["http://a:1", "http://b:1"], {"kind": "simulated"}):
        jsonschema_rs.validate(engine, good)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(engine, {"kind": "simulation"})


def test_a_log_that_cannot_be_written_costs_no_row(tmp_path: Path) -> None:
    """Nor does it change the exit code: standard error may be on a full disk, or a pipe that nobody reads."""
    job = job_of(tmp_path, rows=300)
    command = [sys.executable, "-m", "batchrunner", str(write_job(job, tmp_path))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, timeout=PATIENCE_S, check=False)
        wrong = subprocess.run([*command, "--set", "limits=7"], stderr=full, timeout=PATIENCE_S, check=False)
    assert (done.returncode, wrong.returncode) == (0, 2)
    assert rows_in(job) == list(range(300))
