"""A run ends with the one change that would gain most, as a person types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from batchrunner.advise.advise import closing_line
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import load_job
from tests.advise.test_from_run import tell, with_job
from tests.conftest import batchrun, job_of, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.sglang_logs import LogWriter


@pytest.fixture
def own(server: FakeSGLang, tmp_path: Path) -> Path:
    """Return the directory of a run that ended, for a test to change."""
    job = job_of(tmp_path, server, rows=10)
    assert batchrun(write_job(job, tmp_path)).exit_code == 0
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("kind", "typed"),
    [
        ("server", "--set engine.args.max-running-requests=192"),
        ("gateway", "--set engine.args.max-running-requests=192"),
        ("attach", "start the server with --max-running-requests 192"),
    ],
)
def test_the_change_is_typed_where_the_flags_are(kind: str, typed: str, own: Path) -> None:
    """A launched server has its flags from the job; another one is started by somebody else."""
    with_job(own, engine={"kind": kind})
    LogWriter().started(most=64).decode(30, r=64, u=0.3).write(own, "engine-server.log")
    tell(own / "events.jsonl", running=64, max_running=64, token_usage=0.3)
    line = closing_line(own)
    assert line is not None
    assert line.startswith(f"to gain more: {typed}: as many requests run as may (64)")
    assert line.endswith(f"(batchrun advise {own})")


def test_a_variable_of_the_server_is_typed_too(own: Path) -> None:
    """A limit on what is reserved is no flag: it goes into the engine's environment."""
    with_job(own, engine={"kind": "server"})
    facts = json.loads((own / "run.json").read_text())
    facts["fingerprint"]["sampling"]["max_new_tokens"] = 4000
    (own / "run.json").write_text(json.dumps(facts))
    LogWriter().started(schedule_conservativeness=0.3).decode(30, r=20, u=0.3).write(own, "engine-server.log")
    tell(own / "events.jsonl", running=20, max_running=256, token_usage=0.3)
    typed = shlex.split((closing_line(own) or "").removeprefix("to gain more: "))
    assert typed[0] == "--set"
    name, _, value = typed[1].removesuffix(":").removesuffix(",").partition("=")
    assert name == "engine.env.SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
    assert int(value.strip('"')) > 0
    job = job_of(own, {"kind": "server", "model": str(own)}, rows=3)
    engine = load_job(job, overrides=[f"{name}={value}"]).engine
    assert isinstance(engine, ServerEngine)
    assert engine.env == {name.rpartition(".")[2]: value.strip('"')}


def test_a_flag_to_remove_is_said_in_words(own: Path) -> None:
    """`--set` cannot take a flag out of a job."""
    with_job(own, engine={"kind": "server"})
    LogWriter().started(disable_cuda_graph=True).decode(30, g=False).write(own, "engine-server.log")
    tell(own / "events.jsonl")
    assert (closing_line(own) or "").startswith("to gain more: without --disable-cuda-graph: ")


def test_a_path_with_a_space_is_typed_in_quotes(own: Path) -> None:
    """The command can be copied as it stands."""
    moved = own.rename(own.with_name("my run"))
    with_job(moved, engine={"kind": "attach"})
    LogWriter().started(most=64).decode(30, r=64, u=0.3).write(moved, "engine-server.log")
    tell(moved / "events.jsonl", running=64, max_running=64, token_usage=0.3)
    assert (closing_line(moved) or "").endswith(f"(batchrun advise '{moved}')")


def test_nothing_is_said_where_nothing_is_wrong(own: Path) -> None:
    """Neither of a healthy run, nor of a short one, nor of options, nor of a directory that is no run."""
    assert closing_line(own) is None
    LogWriter().started(enable_metrics=False).decode(30).write(own, "engine-server.log")
    tell(own / "events.jsonl")
    assert closing_line(own) is None
    (own / "run.json").write_text("{")
    assert closing_line(own) is None
    assert closing_line(own / "parts") is None


def test_it_is_the_last_line(server: FakeSGLang, tmp_path: Path) -> None:
    """Rows that were sent before count as well; who has nothing left to do gets none, nor a script."""
    job = job_of(tmp_path, server, rows=30, window=5)
    file = write_job(job, tmp_path)
    assert batchrun(file, "--limit", 20).exit_code == 0
    events = tmp_path / "run" / "events.jsonl"
    kept = events.read_text().splitlines()
    (start,) = (line for line in kept if json.loads(line)["event"] == "start")
    tell(events, queue=0, running=5, in_flight=5, window=5)
    events.write_text("\n".join([start, *events.read_text().splitlines()[1:]]) + "\n")
    result = batchrun(file)
    assert result.exit_code == 0, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("to gain more: `window: auto` instead of 5: ")
    assert result.stdout.strip() == str(tmp_path / "run" / "parts")
    assert "to gain more" not in batchrun(file).stderr
    assert "to gain more" not in batchrun(file, "--quiet", "--fresh").stderr
