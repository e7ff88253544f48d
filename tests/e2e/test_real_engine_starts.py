"""The real engine as a run starts it: deaths, a killed runner, another interpreter, a trial, a GPU."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrunner.core.timing import TIMING
from batchrunner.job.load import load_job
from batchrunner.output.events import read_events
from batchrunner.runner.prepare import prepare
from batchrunner.runner.trial import TrialRunner
from batchrunner.runner.tune import engine_to_tune
from batchrunner.runner.tuning_sample import write_sample
from batchrunner.sglang.device import has_gpu
from batchrunner.tuning.search import TrialRequest
from tests.conftest import SMALL_MODEL, eventually, report_of, require_engine, write_job
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
from tests.support.runs import rows_once
from tests.support.tiny_model import make_tiny_llama

ROWS, AT_ONCE = 120, 40
OTHER_PYTHON = shutil.which("python3", path=str(Path(sys.executable).parent))
"""Another name of this interpreter: what it starts is told by its command line."""

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.filterwarnings("default")]
on_a_gpu = pytest.mark.skipif(not has_gpu(), reason="skipped: no GPU")


def _job(directory: Path, rows: dict[str, Any], tokens: int = 40, **changes: Any) -> dict[str, Any]:
    """Return a job on a random model, of `shape`, whose steps cost next to nothing."""
    require_engine("sglang")
    model = make_tiny_llama(directory / "model", SMALL_MODEL, **changes.pop("shape", {}))
    pq.write_table(pa.table(rows), directory / "rows.parquet")
    return {
        "input": {"path": str(directory / "rows.parquet")},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "order": "input",
        "output": {"path": str(directory / "run"), "part_rows": 20},
        **changes,
        "engine": {"kind": "server", "model": str(model), "device": "cpu", **changes.get("engine", {})},
    }


def _command(job: dict[str, Any], directory: Path) -> list[str]:
    return [sys.executable, "-m", "batchrunner", str(write_job(job, directory))]


_GATES = """
import os

def judge(answer, row):
    gate = str(int(row["text"].split()[1]) // int(os.environ["AT_ONCE"]))
    return os.path.exists(os.path.join(os.environ["GATES"], gate)) or "not yet"
"""
"""A module that takes answers to the first, second, … AT_ONCE rows once there is a file 0, 1, …"""


def test_a_run_that_takes_every_blow(tmp_path: Path) -> None:
    """A SIGKILL ends the engine, which comes back; a SIGKILL of the runner ends all that it started.

    Rows are asked for again until there is a file, so that they cannot end before, however fast the machine
    is. The engine has an interpreter of its own, and its processes are spawned, as users have them.
    """
    spawn, gates, parts = tmp_path / "spawn", tmp_path / "gates", tmp_path / "run" / "parts"
    spawn.touch()
    gates.mkdir()
    (tmp_path / "gates.py").write_text(_GATES)
    job = _job(
        tmp_path,
        {"text": [f"row {row} of many" for row in range(ROWS)]},
        accept={"python": "gates:judge", "tries": 100, "feedback": False},
        engine={"python": OTHER_PYTHON},
    )
    job["input"]["columns"] = ["text"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "GATES": str(gates), "AT_ONCE": str(AT_ONCE)}
    environ = marked({**os.environ, **own, SPAWN: str(spawn)}, tmp_path)
    lines: list[str] = []

    def written() -> int:
        return len(list(parts.glob("part-*.parquet")))

    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(_command(job, tmp_path), env=environ, stderr=subprocess.PIPE, text=True)
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


async def test_a_trial_of_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed and passes are what the setting makes of them.

    Outputs differ in length: SGLang publishes its load at a prefill pass, and two equal outputs end together,
    so that none would run in any reading.
    """
    monkeypatch.setattr(TIMING, "trial_steady", 4.0)
    ids = [[(7 * row + at) % 9000 + 100 for at in range(40)] for row in range(2000)]
    lengths = [8 if row % 2 else 24 for row in range(2000)]
    rows = {"ids": pa.array(ids, pa.list_(pa.int32())), "length": lengths}
    sampling = {"max_new_tokens": {"column": "length"}, "temperature": 0, "ignore_eos": True}
    job = load_job(_job(tmp_path, rows, prompt={"input_ids": "ids"}, sampling=sampling))
    tune = tmp_path / "tune"
    bench = TrialRunner(job, engine_to_tune(job), write_sample(prepare(job), tune), tune)
    own = await bench.run(TrialRequest({"max-running-requests": 2}, "", 0), 0, START_S)
    assert own.ended == "measured", own
    assert own.tokens_per_s > 0
    assert (own.signs.max_running, own.signs.shows("at_cap"), own.signs.shows("waiting")) == (2, True, True)
    # The 16 tokens of a row take 1 prefill pass and 7.5 decode passes.
    assert own.signs.tokens_per_pass == pytest.approx(16 / 8.5, rel=0.15)
    assert own.facts.chunk
    assert own.facts.arguments["max_running_requests"] == 2
    assert not (tune / "000" / "run").exists()


@pytest.mark.gpu
@on_a_gpu
def test_gpu_is_used_where_there_is_one(tmp_path: Path) -> None:
    """With `device: auto` the same job runs on the GPU."""
    job = _job(tmp_path, {"text": ["a text"] * 50}, engine={"device": "auto"})
    done = subprocess.run(
        [*_command(job, tmp_path), "--json"], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows_ok"] == 50
    assert not any("CPU engine" in note for note in report["engine"]["notes"])


FOR_A_CARD = {"hidden": 1024, "layers": 4, "head": 64}
"""32 kB a token, with heads that a card's attention backends know."""
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hog(leaves_bytes: int) -> Iterator[None]:
    """Hold all of the card's free memory but this, as another user of it may."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(leaves_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "holds"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(
    ("kind", "words", "tokens", "flag"),
    [
        # short prompts, then long ones: a pass of 16,384 tokens wants more than all passes before
        ("prefill", [20] * 64 + [1500] * 400, 4, "chunked-prefill-size"),
        # ever more run at once: the logits of a decode step, 200 kB a row, want more than any pass before
        ("decode", [8] * 4000, 400, "max-running-requests"),
    ],
)
def test_out_of_memory_on_a_card(tmp_path: Path, kind: str, words: list[int], tokens: int, flag: str) -> None:
    """A card that another process fills in mid-run: the guides' step for that pass, and every row once."""
    args = {
        "mem-fraction-static": 0.5, "chunked-prefill-size": 16384, "disable-cuda-graph": True,
        "max-running-requests": 2048,
    }  # fmt: skip
    texts = [
        f"{row}: " + " ".join(str(row * n % 997) for n in range(1, count)) for row, count in enumerate(words)
    ]
    engine = {"device": "cuda", "args": args}
    job = _job(tmp_path, {"text": texts}, tokens, shape=FOR_A_CARD, engine=engine)
    events = tmp_path / "run" / "events.jsonl"

    def rows_done() -> int:
        samples = [event for event in read_events(events) if event["event"] == "sample"]
        return int(samples[-1]["rows_done"]) if samples else 0

    with subprocess.Popen(_command(job, tmp_path), stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: rows_done() >= 1 or process.poll() is not None, START_S)
        with hog(64 << 20):
            eventually(lambda: '"engine_died"' in events.read_text() or process.poll() is not None, START_S)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, errors[-4000:]
    rows_once(job, len(words))
    healed = [told for told in report_of(job)["incidents"] if told["what"] == "healed"]
    assert healed[0]["kind"] == kind, json.dumps(healed)
    assert flag in healed[0]["new"]
