"""The real engine as a run starts it: deaths, hangs, refused starts, other interpreters, trials of flags."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrunner
from batchrunner.core.timing import TIMING
from batchrunner.engines.device import has_gpu
from batchrunner.job.load import load_job
from batchrunner.output.events import read_events
from batchrunner.runner.prepare import prepare
from batchrunner.tune.measurement import Incumbent
from batchrunner.tune.sample import write_sample
from batchrunner.tune.search import TrialRequest
from batchrunner.tune.trial import TrialRunner
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import ROOT, SMALL_MODEL, eventually, require_engine
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
from tests.support.memory_cgroup import MemoryCgroup, memory_cgroup_if_possible, require_cgroup
from tests.support.server_thread import PATIENCE_S
from tests.support.tiny_model import make_tiny_llama

JOBS = ROOT / "jobs"
STRUCK_ROWS, AT_ONCE = 200, 40
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


def _more_than(before: int, count: Callable[[], int]) -> bool:
    return count() > before


@dataclass(frozen=True)
class StruckRun:
    """A run whose engine is killed, then hangs, whose runner is killed, and the start that ends it."""

    directory: Path
    group: MemoryCgroup | None
    """Where memory ran out; None where no cgroup could be made, and the engine got a SIGKILL."""
    errors: str
    """Standard error of the first start."""
    tree: list[str]
    """Command lines of the runner, the launcher, the server and its children when the runner was killed."""
    kept: int
    """Rows in parts when the runner was killed."""
    outlived: list[str]
    """Command lines of the engine that never ended after that."""
    report: dict[str, Any]
    """What the second start wrote to standard output."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of both starts."""
        return [*read_events(self.directory / "run" / "events.jsonl")]

    @property
    def names(self) -> list[str]:
        """Names of the events of both starts."""
        return [event["event"] for event in self.events]


@pytest.fixture(scope="module")
def struck(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> StruckRun:
    """One run takes every blow: a start of the engine costs half a minute.

    Rows are asked for again until there is a file, so that it cannot end before, however fast the machine is.
    Its engine has an interpreter of its own. When the runner is killed, the engine's processes were spawned,
    as users have them.
    """
    directory = tmp_path_factory.mktemp("struck")
    spawn = directory / "spawn"
    gates = directory / "gates"
    gates.mkdir()
    (directory / "gates.py").write_text(_GATES)
    command = _tiny_job(
        directory, tiny, STRUCK_ROWS, check={"python": "gates:judge", "tries": 100, "feedback": False},
        limits={"hang": 5},
    )  # fmt: skip
    command += ["--set", f"engine.python={OTHER_PYTHON}"]
    command += ["--set", "engine.args={max-total-tokens: 100000}"]
    # what it learns of the memory is not for other tests
    own = {"XDG_CACHE_HOME": str(directory / "cache"), "GATES": str(gates), "AT_ONCE": str(AT_ONCE)}
    environ = marked({**os.environ, **own}, directory)
    parts = directory / "run" / "parts"
    lines: list[str] = []

    def written() -> int:
        return len(list(parts.glob("part-*.parquet")))

    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_cgroup_if_possible(8 << 30))
        process = stack.enter_context(
            subprocess.Popen(
                group.command(*command) if group else command,
                env={**environ, SPAWN: str(spawn)}, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        stack.callback(process.kill)
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,))
        reader.start()

        def backs() -> int:
            return sum("the engine is back" in line for line in lines)

        for gate, blow in enumerate(("death", "hang", "end")):
            victim, before, comebacks = scheduler_of(process), written(), backs()
            (gates / str(gate)).touch()
            wait_while_it_runs(process, partial(_more_than, before, written))
            if blow == "end":
                break
            if blow == "hang":
                spawn.touch()
                os.kill(victim, signal.SIGSTOP)
            elif group:
                group.run_out(victim)
            else:
                os.kill(victim, signal.SIGKILL)
            wait_while_it_runs(process, partial(_more_than, comebacks, backs))
        pids = [process.pid, *descendants_of(process.pid)]
        tree = [*map(command_line, pids)]
        process.kill()
        reader.join()
        for gate in range(STRUCK_ROWS // AT_ONCE):
            (gates / str(gate)).touch()
        kept = pq.read_table(parts).num_rows
        with contextlib.suppress(AssertionError):
            eventually(lambda: not processes_of(directory) and not any(map(command_line, pids)))
        outlived = [*filter(None, map(command_line, {*pids, *processes_of(directory)}))]
    done = subprocess.run(
        [*command, "--json"], env=environ, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return StruckRun(directory, group, "".join(lines), tree, kept, outlived, json.loads(done.stdout))


def test_killed_runner_takes_its_server_along(struck: StruckRun) -> None:
    """SIGKILL of the runner ends the server; no file has the key."""
    assert len(struck.tree) >= 4  # runner, launcher, server, scheduler
    assert struck.outlived == []
    log = (struck.directory / "run" / "engine-server.log").read_text(errors="replace")
    assert "api_key='***'" in log or '"***"' in log or "***" in log


def test_killed_runner_resumes(struck: StruckRun) -> None:
    """The next start sends what is missing: every row is there once, with an answer."""
    assert (struck.report["rows_ok"], struck.report["starts"]) == (STRUCK_ROWS, 2)
    assert struck.kept <= struck.report["rows_resumed"] < STRUCK_ROWS  # those in the journal too
    table = pq.read_table(struck.directory / "run" / "parts")
    assert sorted(table["row"].to_pylist()) == list(range(STRUCK_ROWS))
    assert set(table["error"].to_pylist()) == {None}


def test_engine_that_dies_is_started_again(struck: StruckRun) -> None:
    """A scheduler that is killed in mid-run takes its server along; both come back."""
    assert "the engine died" in struck.errors
    assert struck.errors.index("the engine died") < struck.errors.index("the engine is back")
    assert "engine_died" in struck.names


def test_engine_that_hangs_is_started_again(struck: StruckRun) -> None:
    """A scheduler that stands still, behind an HTTP side that answers, is found out and started again."""
    hung = struck.errors.index("the engine did nothing for")
    assert "the engine is back" in struck.errors[hung:]
    assert "engine_hangs" in struck.names


def test_killed_by_the_kernel_in_mid_run(struck: StruckRun) -> None:
    """Its cgroup has no memory left, so that the kernel kills it: it comes back with half the pool."""
    require_cgroup(struck.group)
    told = "killed by the kernel for want of memory: max-total-tokens 100000 -> 50000"
    assert told in struck.errors, struck.errors[-4000:]
    assert [event["kind"] for event in struck.events if event["event"] == "engine_healed"] == ["killed"]


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
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=PATIENCE_S)
    command = [*_tiny_job(tmp_path, tiny, rows=5), "--set", f"engine.python={bare}/bin/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert f"{bare}/bin/python has no SGLang" in done.stderr


def test_another_interpreter_with_sglang(struck: StruckRun) -> None:
    """`engine.python` runs the server in an environment of its own, which needs no batchrunner."""
    assert any(line.startswith(f"{OTHER_PYTHON} ") and "launcher.py" in line for line in struck.tree)


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
    )
    bench = TrialRunner(
        job, engine_to_tune(job), write_sample(prepare(job), tmp_path / "tune"), tmp_path / "tune"
    )
    own = await bench.run(TrialRequest({"max-running-requests": 2}, "", 0), 0, START_S)
    more = await bench.run(
        TrialRequest({"max-running-requests": 32}, "", 0, Incumbent(own.curve, 0.9)), 1, START_S
    )
    refused = await bench.run(TrialRequest({"schedule-policy": "none"}, "", 0), 2, START_S)
    assert (own.ended, more.ended, refused.ended) == ("measured", "measured", "died"), (own, more, refused)
    assert min(own.tokens_per_s, more.tokens_per_s) > 0  # which is faster, a busy machine does not say
    assert (own.signs.max_running, own.signs.at_limit, own.signs.waits) == (2, True, True)
    assert own.signs.tokens_per_pass == pytest.approx(16 * 2 / 17, rel=0.15)  # a prefill pass for each two
    assert more.signs.tokens_per_pass is not None
    assert more.signs.tokens_per_pass > 2 * 16 * 2 / 17
    assert own.signs.prefill_limit is not None
    assert not (tmp_path / "tune" / "000" / "run").exists()
    assert "invalid choice" in refused.why
