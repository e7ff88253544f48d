"""The real engine as a run starts it: a death, a killed runner, another interpreter, a trial of a flag."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrunner.core.timing import TIMING
from batchrunner.engines.device import has_gpu
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from batchrunner.tune.sample import write_sample
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.trial import TrialRunner
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import SMALL_MODEL, eventually, require_engine
from tests.support.engine_processes import (
    START_S,
    command_line,
    descendants_of,
    marked,
    processes_of,
    scheduler_of,
    wait_while_it_runs,
)
from tests.support.engine_site.sitecustomize import SPAWN
from tests.support.tiny_model import make_tiny_llama

ROWS, AT_ONCE = 120, 40
OTHER_PYTHON = shutil.which("python3", path=str(Path(sys.executable).parent))
"""Another name of this interpreter: what it starts is told by its command line."""

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    require_engine("sglang")


@pytest.fixture(scope="session")
def tiny(_prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose steps cost next to nothing."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


def _tiny_job(tmp_path: Path, tiny: Path, rows: int, **changes: Any) -> list[str]:
    source = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"row {i} of many" for i in range(rows)]})
    pq.write_table(table, source)
    job = tmp_path / "job.yaml"
    whole = {
        "input": {"path": str(source), "columns": ["text"]},
        "prompt": {"user": "Say something about {{ text }}"},
        "sampling": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
        "output": {"path": str(tmp_path / "run"), "part_rows": 20},
        "engine": {"kind": "server", "model": str(tiny), "device": "cpu"},
    }
    job.write_text(json.dumps({**whole, **changes}))
    return [sys.executable, "-m", "batchrunner", str(job)]


_GATES = """
import os

def judge(answer, row):
    gate = str(int(row["text"].split()[1]) // int(os.environ["AT_ONCE"]))
    return os.path.exists(os.path.join(os.environ["GATES"], gate)) or "not yet"
"""
"""A module that takes answers to the first, second, … AT_ONCE rows once there is a file 0, 1, …"""


def test_a_run_that_takes_every_blow(tiny: Path, tmp_path: Path) -> None:
    """A SIGKILL ends the engine, which comes back; a SIGKILL of the runner ends all that it started.

    Rows are asked for again until there is a file, so that they cannot end before, however fast the machine
    is. The engine has an interpreter of its own, and its processes are spawned, as users have them.
    """
    spawn, gates, parts = tmp_path / "spawn", tmp_path / "gates", tmp_path / "run" / "parts"
    spawn.touch()
    gates.mkdir()
    (tmp_path / "gates.py").write_text(_GATES)
    command = _tiny_job(
        tmp_path, tiny, ROWS, check={"python": "gates:judge", "tries": 100, "feedback": False}
    )
    command += ["--set", f"engine.python={OTHER_PYTHON}"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "GATES": str(gates), "AT_ONCE": str(AT_ONCE)}
    environ = marked({**os.environ, **own, SPAWN: str(spawn)}, tmp_path)
    lines: list[str] = []

    def written() -> int:
        return len(list(parts.glob("part-*.parquet")))

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,))
        reader.start()
        victim = scheduler_of(process)
        (gates / "0").touch()
        wait_while_it_runs(process, written)
        os.kill(victim, signal.SIGKILL)
        wait_while_it_runs(process, lambda: any("the engine is back" in line for line in lines))
        before = written()
        (gates / "1").touch()
        wait_while_it_runs(process, lambda: written() > before)
        pids = [process.pid, *descendants_of(process.pid)]
        tree = [*map(command_line, pids)]
        process.kill()
        reader.join()
        eventually(lambda: not processes_of(tmp_path) and not any(map(command_line, pids)))
    assert len(tree) >= 4  # runner, launcher, server, scheduler
    assert any(line.startswith(f"{OTHER_PYTHON} ") and "launcher.py" in line for line in tree)
    assert (tmp_path / "run" / "engine-server.log").stat().st_mode & 0o77 == 0  # it may have the server's key
    assert "the engine died" in "".join(lines)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="skipped: no GPU")
def test_gpu_is_used_where_there_is_one(tmp_path: Path, tiny: Path) -> None:
    """With `device: auto` the same job runs on the GPU."""
    command = [*_tiny_job(tmp_path, tiny, rows=50), "--set", "engine.device=auto", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows_ok"] == 50
    assert not any("CPU engine" in note for note in report["engine"]["notes"])


async def test_a_trial_of_a_flag(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed and passes are what the setting makes of them."""
    monkeypatch.setattr(TIMING, "trial_steady", 4.0)
    ids = [[(7 * row + at) % 9000 + 100 for at in range(40)] for row in range(2000)]
    pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / "input.parquet")
    job = load_job(
        {
            "input": {"path": str(tmp_path / "input.parquet")},
            "prompt": {"input_ids": "ids"},
            "sampling": {"max_new_tokens": 16, "ignore_eos": True},
            "output": {"path": str(tmp_path / "run")},
            "engine": {"kind": "server", "model": str(tiny), "device": "cpu"},
        },
    )
    bench = TrialRunner(
        job, engine_to_tune(job), write_sample(prepare(job), tmp_path / "tune"), tmp_path / "tune"
    )
    own = await bench.run(TrialRequest({"max-running-requests": 2}, "", 0), 0, START_S)
    assert own.ended == "measured", own
    assert own.tokens_per_s > 0
    assert (own.signs.max_running, own.signs.at_limit, own.signs.waits) == (2, True, True)
    assert own.signs.tokens_per_pass == pytest.approx(16 * 2 / 17, rel=0.15)  # a prefill pass for each two
    assert own.signs.prefill_limit is not None
    assert not (tmp_path / "tune" / "000" / "run").exists()
