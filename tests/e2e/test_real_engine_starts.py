"""The real engine as a run starts it: deaths, hangs, refused starts, other interpreters, trials of flags."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.engines.device import has_gpu
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from batchrunner.tune.measurement import Incumbent
from batchrunner.tune.sample import write_sample
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.trial import TrialRunner
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import ROOT, SMALL_MODEL, require_engine
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    pass

JOBS = ROOT / "jobs"
START_S = 600
"""A start takes half a minute on a quiet machine, and minutes on a busy one."""

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    require_engine("sglang")


@pytest.fixture(scope="session")
def tiny(_prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose steps cost next to nothing."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", SMALL_MODEL)


def _tiny_job(tmp_path: Path, tiny: Path, rows: int, *, kind: str = "server", tokens: int = 200) -> list[str]:
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [f"row {i} of many" for i in range(rows)]}), source)
    job = tmp_path / "job.yaml"
    job.write_text(
        json.dumps(
            {
                "input": {"path": str(source), "columns": ["text"]},
                "prompt": {"user": "Say something about {{ text }}"},
                "sampling": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
                "output": {"path": str(tmp_path / "run"), "part_rows": 20},
                "engine": {"kind": kind, "model": str(tiny), "device": "cpu"},
            }
        )
    )
    return [sys.executable, "-m", "batchrunner.cli", str(job)]


def _wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _engine_processes(marker: str) -> list[int]:
    """Processes whose environment has the marker: the engine's whole tree, however it renames itself."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _scheduler(tmp_path: Path) -> int:
    """Return the scheduler's process of the engine whose environment bears this mark."""
    return next(
        pid
        for pid in _engine_processes(f"BATCHRUNNER_TEST_MARK={tmp_path}")
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_killed_runner_takes_its_server_along_and_resumes(tmp_path: Path, tiny: Path) -> None:
    """SIGKILL of the runner ends the server; the next start sends what is missing; no file has the key."""
    command = _tiny_job(tmp_path, tiny, rows=200, tokens=100)
    marker = f"BATCHRUNNER_TEST_MARK={tmp_path}"
    environ = {**os.environ, "BATCHRUNNER_TEST_MARK": str(tmp_path)}
    parts = tmp_path / "run" / "parts"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        _wait_for(lambda: len(list(parts.glob("part-*.parquet"))) >= 2, process)
        assert len(_engine_processes(marker)) >= 4  # runner, launcher, server, scheduler
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _engine_processes(marker):
        assert time.monotonic() < deadline, "the server outlived the runner"
        time.sleep(0.1)

    kept = pq.read_table(parts).num_rows
    done = subprocess.run(
        [*command, "--json"], env=environ, capture_output=True, text=True, timeout=START_S, check=True
    )
    report = json.loads(done.stdout)
    assert (report["rows_ok"], report["starts"]) == (200, 2)
    assert kept <= report["rows_resumed"] < 200  # those in the journal too
    rows = pq.read_table(parts)["row"].to_pylist()
    assert sorted(rows) == list(range(200))
    log = (tmp_path / "run" / "engine-server.log").read_text(errors="replace")
    assert "api_key='***'" in log or '"***"' in log or "***" in log


def test_engine_that_dies_is_started_again(tmp_path: Path, tiny: Path) -> None:
    """A scheduler that is killed in mid-run takes its server along; both come back, and no row is lost."""
    command = _tiny_job(tmp_path, tiny, rows=120, tokens=100)
    environ = {**os.environ, "BATCHRUNNER_TEST_MARK": str(tmp_path)}
    parts = tmp_path / "run" / "parts"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        _wait_for(lambda: len(list(parts.glob("part-*.parquet"))) >= 1, process)
        os.kill(_scheduler(tmp_path), signal.SIGKILL)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, errors[-2000:]
    assert "the engine died" in errors
    assert "the engine is back" in errors
    assert sorted(pq.read_table(parts)["row"].to_pylist()) == list(range(120))
    assert set(pq.read_table(parts)["error"].to_pylist()) == {None}


def test_engine_that_hangs_is_started_again(tmp_path: Path, tiny: Path) -> None:
    """A scheduler that stands still, behind an HTTP side that answers, is found out; no row is lost."""
    command = [*_tiny_job(tmp_path, tiny, rows=200, tokens=60), "--set", "limits.hang=5"]
    environ = {**os.environ, "BATCHRUNNER_TEST_MARK": str(tmp_path)}
    parts = tmp_path / "run" / "parts"
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        _wait_for(lambda: len(list(parts.glob("part-*.parquet"))) >= 1, process)
        os.kill(_scheduler(tmp_path), signal.SIGSTOP)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, errors[-2000:]
    assert "the engine did nothing for" in errors
    assert "the engine is back" in errors
    assert sorted(pq.read_table(parts)["row"].to_pylist()) == list(range(200))
    assert set(pq.read_table(parts)["error"].to_pylist()) == {None}
    assert '"engine_hangs"' in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.args={no-such-flag: 3}"], "unrecognized arguments: --no-such-flag"),
        (["engine.args={max-running-requests: many}"], "invalid int value: 'many'"),
    ],
)
def test_engine_that_cannot_start(tmp_path: Path, tiny: Path, overrides: list[str], said: str) -> None:
    """A server that refuses its arguments is one clear line and exit 2, not its 500 lines of usage."""
    command = _tiny_job(tmp_path, tiny, rows=5)
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("batchrun: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stderr


def test_interpreter_without_sglang(tmp_path: Path, tiny: Path) -> None:
    """`engine.python` that has no SGLang is told so by name."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    command = [*_tiny_job(tmp_path, tiny, rows=5), "--set", f"engine.python={bare}/bin/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"{bare}/bin/python has no SGLang" in done.stderr


def test_another_interpreter_with_sglang(tmp_path: Path, tiny: Path) -> None:
    """`engine.python` runs the server in an environment of its own, which needs no batchrunner."""
    python = shutil.which("python3", path=str(Path(sys.executable).parent))
    command = [*_tiny_job(tmp_path, tiny, rows=3, tokens=4), "--set", f"engine.python={python}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_ok"] == 3


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


SAME = ("output", "finish_reason", "prompt_tokens", "completion_tokens")


def test_tokens_made_here_give_the_same_answers(tiny: Path, tmp_path: Path) -> None:
    """Wherever tokens and texts are made: the same prompts to the token, answers to the byte; cuts fit."""
    texts = [
        "Zürich is",
        "日本の首都は",
        "  def f(x):\n\treturn",
        "👩\u200d👧 <|im_end|> &amp;",
        "word " * 5000,
    ]
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": texts}), source)

    def results(
        name: str, engine: batchrunner.OpenEngine | None = None, **changes: Any
    ) -> dict[str, list[Any]]:
        job: dict[str, Any] = {
            "input": {"path": str(source)},
            "sampling": {"max_new_tokens": 24, "temperature": 0},
            "output": {"path": str(tmp_path / name)},
            "engine": spec,
            "limits": {"max_failed_rows": 1},
            **changes,
        }
        assert batchrunner.run(job, engine=engine).exit_code == 0
        table: pa.Table = pq.read_table(tmp_path / name / "parts").sort_by("row")
        return {name: table[name].to_pylist() for name in table.column_names if name != "latency_s"}

    spec = {"kind": "server", "model": str(tiny), "device": "cpu"}
    bare: dict[str, Any] = {
        "tokenize": "client",
        "sampling": {"max_new_tokens": 120, "n": 2, "temperature": 0},
    }
    without = results("bare", prompt={"text": "{{ text }} "}, **bare)
    assert "skip_tokenizer_init=True" in (tmp_path / "bare" / "engine-server.log").read_text()
    with batchrunner.open_engine(spec, log_dir=tmp_path) as engine:
        whole = results("whole", engine, prompt={"text": "{{ text }} "}, **{**bare, "tokenize": "server"})
        assert {name: without[name] for name in SAME} == {name: whole[name] for name in SAME}
        for kind in ("user", "text"):
            prompt = {kind: "{{ text }} "}
            ours = results(f"client-{kind}", engine, prompt=prompt, tokenize="client")
            theirs = results(f"server-{kind}", engine, prompt=prompt, tokenize="server")
            assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
            for found in (ours, theirs):
                assert [error is None for error in found["error"]] == [True] * 4 + [False]
                assert "longer than the model's context length (4096 tokens)" in found["error"][4]
            cut = results(f"cut-{kind}", engine, prompt={**prompt, "truncate": "middle"})
            assert cut["error"] == [None] * 5
            assert 4060 <= cut["prompt_tokens"][4] <= 4096 - 24
            assert cut["output"][:4] == ours["output"][:4]


async def test_trials_of_flags(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of two settings and of a flag that SGLang refuses: speeds, passes and deaths as they are."""
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
        environ={},
    )
    bench = TrialRunner(
        job, engine_to_tune(job), write_sample(prepare(job), tmp_path / "tune"), tmp_path / "tune"
    )
    own = await bench.run(TrialRequest({"max-running-requests": 2}, "", 0), 0, START_S)
    more = await bench.run(
        TrialRequest({"max-running-requests": 32}, "", 0, Incumbent(own.curve, 0.3)), 1, START_S
    )
    refused = await bench.run(TrialRequest({"schedule-policy": "none"}, "", 0), 2, START_S)
    assert (own.ended, more.ended, refused.ended) == ("measured", "measured", "died"), (own, more, refused)
    assert more.tokens_per_s > 1.5 * own.tokens_per_s
    assert (own.signs.max_running, own.signs.at_limit, own.signs.waits) == (2, True, True)
    assert own.signs.tokens_per_pass == pytest.approx(16 * 2 / 17, rel=0.15)  # a prefill pass for each two
    assert own.signs.prefill_limit is not None
    assert not (tmp_path / "tune" / "000" / "run").exists()
    assert "invalid choice" in refused.why
