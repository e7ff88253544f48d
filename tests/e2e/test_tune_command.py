"""`batchrun tune` from start to end."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.sglang.flags import Flags
from batchrunner.tuning.space import Machine
from tests.conftest import batchrun, eventually, job_of, started, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import launchable
from tests.support.tuning_lab import CPU, LOG

LIMITED = """
import threading
RUNS = int(sys.argv[sys.argv.index("--max-running-requests") + 1])
if RUNS > int(os.environ["ROOM"]):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
slots, counting, inside = threading.Semaphore(RUNS), threading.Lock(), [0, 0.0]

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "limited"},
        "/server_info": {"version": "0.5.23", "max_running_requests": RUNS},
    }
    def do_GET(self):
        if not self.path.startswith("/v1/loads"):
            return super().do_GET()
        running = min(inside[0], RUNS)
        self.reply(200, {"loads": [{
            "num_running_reqs": running, "num_waiting_reqs": inside[0] - running, "dp_rank": 0,
            "token_usage": running / 64, "max_running_requests": RUNS, "timestamp": time.time(),
            "max_total_num_tokens": 6400, "num_used_tokens": 100 * running}]})
    def asked(self, body):
        with counting:
            inside[0] += 1
        with slots:
            time.sleep(0.2)
        with counting:
            inside[0] -= 1
        self.answer("to " + body["text"])
"""
"""Runs `--max-running-requests` at once, and dies at its start of more than there is room for."""


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a few seconds, for an engine whose rows take 0.2 s.

    So 16 at once are 8 times as fast as 2, and faster even where the machine stands still for a while.
    """
    monkeypatch.setattr(TIMING, "trial_steady", 2.0)
    monkeypatch.setattr(TIMING, "trial_judged", 1.5)
    monkeypatch.setattr(TIMING, "load_poll", 0.05)
    monkeypatch.setattr(TIMING, "launch_poll", 0.02)


def limited_job(directory: Path, *, room: int = 20, **changes: Any) -> dict[str, Any]:
    engine = launchable(directory, LIMITED, ROOM=str(room)) | {"args": {"max-running-requests": 2}}
    return job_of(directory, engine, rows=3000, **changes)


@pytest.mark.usefixtures("short_trials")
def test_the_command(tmp_path: Path) -> None:
    """It finds what is faster, takes a death at the start for a result, shows it, and changes nothing.

    Files of a trial or record that a crash cut short do not count. Started again it launches nothing: it has
    all trials.
    """
    file, tune = write_job(limited_job(tmp_path), tmp_path), tmp_path / "run" / "tune"
    (tune / "000").mkdir(parents=True)
    (tune / "000" / "engine-server.log").write_text(LOG * 5)
    (tune / "trials.jsonl").write_text('{"about": "x", "args": {}, "res')
    before = file.read_text()
    result = batchrun("tune", file, "--budget", "30m")
    assert result.exit_code == 0, result.stderr
    assert "unsafe: the engine did not start" in result.stdout
    assert "CUDA out of memory" in result.stdout
    block = yaml.safe_load(result.stdout.split("job's own flags (")[1].split("with\n\n")[1].split("\n\n")[0])
    assert 2 < block["engine"]["args"]["max-running-requests"] <= 20
    assert file.read_text() == before
    assert not list((tmp_path / "run").glob("parts/*"))  # the run itself has not begun
    trials = (tune / "trials.jsonl").read_bytes()
    options = ["--json", "--quiet", "--set", "limits.max_failed_rows=1"]
    again = batchrun("tune", file, *options)
    assert (tune / "trials.jsonl").read_bytes() == trials
    assert again.stderr == ""
    found = json.loads(again.stdout)
    assert found["trials"][0]["signs"]["max_running"] == 2  # not of the old log
    assert found["args"] == block["engine"]["args"]


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("rows", [40, 1500])
def test_rows_that_all_fail(tmp_path: Path, rows: int) -> None:
    """Where the engine refuses each row there is no speed: one line says so, with what the engine said.

    Many rows are not waited for: the run of the trial gives up.
    """
    said = "self.reply(400, {\"message\": f\"temperature {body['sampling_params'].get('temperature')}\"})"
    script = LIMITED.replace('self.answer("to " + body["text"])', said)
    engine = launchable(tmp_path, script, ROOM="20") | {"args": {"max-running-requests": 2}}
    job = job_of(tmp_path, engine, rows=rows, accept={"regex": "x"}, sampling={"temperature": 0.25})
    result = batchrun("tune", write_job(job, tmp_path))
    assert result.exit_code == 2, result.stdout
    assert "the job's own flags cannot be measured: all rows failed, for example: " in result.stderr
    assert "temperature 0.25" in result.stderr
    assert "Traceback" not in result.stderr


def test_trials_of_another_machine_or_job_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that machines share each finds its own; other rows in flight are another job."""
    found = []

    def history(path: Path, about: str, base: dict[str, Any]) -> None:
        found.append(about)
        raise JobError("enough")

    monkeypatch.setattr("batchrunner.runner.tune.TrialHistory", history)
    file = write_job(limited_job(tmp_path), tmp_path)
    h100 = Machine(Flags(), cpu=False, card="NVIDIA H100 80GB HBM3", card_gb=80)
    for machine in (h100, CPU):
        monkeypatch.setattr("batchrunner.runner.tune.machine_for", lambda *_, **__: machine)  # noqa: B023
        for setting in ("window=auto", "window=8"):
            assert "enough" in batchrun("tune", file, "--set", setting).stderr
    assert len(set(found)) == len(found) == 4


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second one on the same output path would take the first one's servers and trials for its own."""
    job = limited_job(tmp_path)
    file = write_job(job, tmp_path)
    with hold_task(RunDir(job["output"]["path"]), directory=tmp_path / "run" / "tune"):
        second = batchrun("tune", file, "--budget", "1m")
    assert second.exit_code == 2
    assert "is writing this run: wait until that process ends, or use another path" in second.stderr
    assert not (tmp_path / "run" / "tune").exists()


def test_an_interrupted_trial_leaves_nothing(tmp_path: Path) -> None:
    """A Ctrl-C ends the engine and the command, without a record of what was not measured."""
    file = write_job(limited_job(tmp_path), tmp_path)
    tune = tmp_path / "run" / "tune"
    with started("tune", file) as run:
        run.wait_for_line("sample: all 3,000 rows")
        eventually((tune / "000" / "run" / "run.json").exists)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert "Traceback" not in "".join(run.lines)
    assert not (tune / "trials.jsonl").exists()


def test_a_server_that_runs_already_is_refused(server: FakeSGLang, tmp_path: Path) -> None:
    """The flags of an engine that the run does not start cannot be changed: one line, exit 2."""
    result = batchrun("tune", write_job(job_of(tmp_path, server), tmp_path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "this job starts no server" in result.stderr
