"""Tuning a job: the rows of its trials, the block in its file, the command from start to end."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import batchrunner
from batchrunner.core.errors import JobError
from batchrunner.engines.flags import Flags
from batchrunner.job.load import load_job
from batchrunner.output.run_dir import RunDir
from batchrunner.output.task_lock import hold_task
from batchrunner.runner.prepare import prepare
from batchrunner.tune import measure
from batchrunner.tune.edit import apply_args, edited
from batchrunner.tune.log_work import output_rate, signs_at_start, signs_of_work
from batchrunner.tune.sample import BLOCK_ROWS, chosen, spread, take
from batchrunner.tune.space import Machine
from batchrunner.tune.tuner import engine_to_tune
from tests.conftest import INSTANT, batchrun, eventually, job_of, started, write_job
from tests.support.launchable import launchable
from tests.support.tuning_lab import CPU

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.job.spec import ServerEngine
    from tests.support.fake_sglang import FakeSGLang

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
            time.sleep(0.02)
        with counting:
            inside[0] -= 1
        self.answer("to " + body["text"])
"""
"""Runs `--max-running-requests` at once, and dies at its start of more than there is room for."""


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a second, for an engine whose rows take 20 ms."""
    monkeypatch.setattr(measure, "LEAST_STEADY_S", 0.6)
    monkeypatch.setattr(measure, "LEAST_JUDGED_S", 0.4)
    monkeypatch.setattr("batchrunner.dispatch.load_loop.POLL_S", 0.05)
    monkeypatch.setattr("batchrunner.engines.launched.process.POLL_S", 0.02)


def limited_job(directory: Path, *, room: int = 20, **changes: Any) -> dict[str, Any]:
    engine = launchable(directory, LIMITED, ROOM=str(room)) | {"args": {"max-running-requests": 2}}
    return job_of(directory, engine, rows=3000, **changes)


@pytest.mark.usefixtures("short_trials")
def test_the_command(tmp_path: Path) -> None:
    """It finds what is faster, takes a death at the start for a result, shows it, and changes nothing."""
    file = write_job(limited_job(tmp_path), tmp_path)
    before = file.read_text()
    result = batchrun("tune", file, "--budget", "2m")
    assert result.exit_code == 0, result.stderr
    assert "unsafe: the engine did not start" in result.stdout
    assert "CUDA out of memory" in result.stdout
    block = yaml.safe_load(result.stdout.split("job's own flags (")[1].split("with\n\n")[1].split("\n\n")[0])
    assert 2 < block["engine"]["args"]["max-running-requests"] <= 20
    assert file.read_text() == before
    assert not list((tmp_path / "run").glob("parts/*"))  # the run itself has not begun


@pytest.mark.usefixtures("short_trials")
def test_apply_and_again(tmp_path: Path) -> None:
    """--apply writes the block into the file; a second start launches nothing, it has all trials."""
    file = write_job(limited_job(tmp_path), tmp_path)
    first = batchrun("tune", file, "--json", "--quiet")
    trials = (tmp_path / "run" / "tune" / "trials.jsonl").read_bytes()
    second = batchrun("tune", file, "--json", "--apply", "--set", "limits.max_failed_rows=1")
    assert (tmp_path / "run" / "tune" / "trials.jsonl").read_bytes() == trials
    found, again = json.loads(first.stdout), json.loads(second.stdout)
    assert found | {"applied": True} == again
    assert load_job(file).engine.model_dump()["args"] == found["args"]
    assert first.stderr == ""


@pytest.mark.usefixtures("short_trials")
def test_an_older_log_does_not_count(tmp_path: Path) -> None:
    """What a trial of a changed job, or one that was cut, has left in the directory is no part of a trial."""
    old = tmp_path / "run" / "tune" / "000" / "engine-server.log"
    old.parent.mkdir(parents=True)
    old.write_text(LOG * 5)
    result = batchrun("tune", write_job(limited_job(tmp_path, room=2), tmp_path), "--json")
    trial = json.loads(result.stdout)["trials"][0]
    assert trial["signs"]["attention_backend"] is None
    assert trial["signs"]["graph_off_share"] is None


def test_passes_are_counted_by_our_own_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have its server log less often; its trials' passes are counted all the same."""
    launched: list[dict[str, Any]] = []

    def engine(spec: ServerEngine, **_: Any) -> None:
        launched.append(spec.args)
        raise JobError("enough")

    monkeypatch.setattr("batchrunner.tune.trial.make_engine", engine)
    options = ["--set", "engine.args.decode-log-interval=40"]
    assert "enough" in batchrun("tune", write_job(limited_job(tmp_path), tmp_path), *options).stderr
    assert [args["decode-log-interval"] for args in launched] == [10]


@pytest.mark.usefixtures("short_trials")
def test_rows_that_all_fail(tmp_path: Path) -> None:
    """Where the engine refuses each row there is no speed: one line says so, with what the engine said."""
    script = LIMITED.replace('self.answer("to " + body["text"])', "self.reply(400, REFUSED)")
    refused = 'REFUSED = {"error": {"message": "no adapter is loaded", "code": 400}}\n'
    engine = launchable(tmp_path, refused + script, ROOM="20") | {"args": {"max-running-requests": 2}}
    result = batchrun("tune", write_job(job_of(tmp_path, engine, rows=40), tmp_path))
    assert result.exit_code == 2, result.stdout
    assert "the job's own flags cannot be measured: all rows failed, such as with: " in result.stderr
    assert "no adapter is loaded" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", ["--set", "environment"])
def test_an_engine_that_is_not_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """What is measured with other flags than the file's is not written there: one line, before any trial."""
    file = write_job(limited_job(tmp_path), tmp_path)
    before, options = file.read_text(), ["--set", "input.limit=500"]
    if how == "environment":
        monkeypatch.setenv("BATCHRUN__ENGINE__ARGS__CHUNKED-PREFILL-SIZE", "512")
    else:
        options += ["--set", "engine.args.chunked-prefill-size=512"]
    result = batchrun("tune", file, "--apply", *options)
    assert result.exit_code == 2
    assert "change the engine of" in result.stderr
    assert result.stderr.count("\n") == 1
    assert file.read_text() == before
    assert not (tmp_path / "run" / "tune" / "trials.jsonl").exists()


def test_trials_of_another_machine_or_job_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that machines share each finds its own; other rows in flight are another job."""
    found = []

    def history(path: Path, about: str, base: dict[str, Any]) -> None:
        found.append(about)
        raise JobError("enough")

    monkeypatch.setattr("batchrunner.tune.tuner.History", history)
    file = write_job(limited_job(tmp_path), tmp_path)
    h100 = Machine(Flags(), cpu=False, cards=1, card="NVIDIA H100 80GB HBM3", card_gb=80)
    for machine in (h100, replace(h100, card="NVIDIA H100 PCIe"), replace(h100, card_gb=94), CPU):
        monkeypatch.setattr("batchrunner.tune.tuner.machine_for", lambda *_, **__: machine)  # noqa: B023
        for setting in ("window=auto", "window=8", "queue=[10, 100]", "dedupe=false"):
            assert "enough" in batchrun("tune", file, "--set", setting).stderr
    assert len(set(found)) == len(found) == 16


@pytest.mark.usefixtures("short_trials")
def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    """What a crash cut short is tried again, and what comes after it is kept."""
    file = write_job(limited_job(tmp_path), tmp_path)
    path = tmp_path / "run" / "tune" / "trials.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"about": "x", "args": {}, "res')
    assert batchrun("tune", file).exit_code == 0
    kept = path.read_bytes()
    assert batchrun("tune", file).exit_code == 0
    assert path.read_bytes() == kept


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second one on the same output path would take the first one's servers and trials for its own."""
    job = limited_job(tmp_path)
    file = write_job(job, tmp_path)
    with hold_task(RunDir(job["output"]["path"]), directory=tmp_path / "run" / "tune"):
        second = batchrun("tune", file, "--budget", "1m")
    assert second.exit_code == 2
    assert "is writing this run; wait for it or use another path" in second.stderr
    assert not (tmp_path / "run" / "tune").exists()


def test_an_interrupted_trial_leaves_nothing(tmp_path: Path) -> None:
    """A Ctrl-C ends the engine and the command, without a record of what was not measured."""
    file = write_job(limited_job(tmp_path), tmp_path)
    tune = tmp_path / "run" / "tune"
    with started("tune", file) as run:
        run.wait_for_line("sample: all 3000 rows")
        eventually((tune / "000" / "run" / "run.json").exists)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert "Traceback" not in "".join(run.lines)
    assert not (tune / "trials.jsonl").exists()


def test_a_server_that_runs_already_is_refused(server: FakeSGLang, tmp_path: Path) -> None:
    """The flags of an engine that the run does not start cannot be changed: one line, exit 2."""
    for engine in (server, INSTANT):
        result = batchrun("tune", write_job(job_of(tmp_path, engine), tmp_path))
        assert result.exit_code == 2
        assert "this job starts none" in result.stderr
        assert result.stderr.count("\n") == 1
    assert server.sent == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--budget", "soon"], "--budget soon: a duration is seconds or a text such as 90s"),
        (["--allow", "magic"], "--allow magic: give quantization or torch-compile"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], line: str) -> None:
    """A wrong option is one line and exit 2, before anything is started."""
    result = batchrun("tune", write_job(limited_job(tmp_path), tmp_path), *options)
    assert result.exit_code == 2
    assert line in result.stderr


def sampled(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[int]:
    monkeypatch.setattr("batchrunner.tune.sample.MOST_ROWS", 512)
    job = load_job(job_of(tmp_path, rows=rows, **changes), environ={})
    sample = take(prepare(job), tmp_path / "tune")
    texts: list[str] = pq.read_table(sample.path)["text"].to_pylist()
    assert sample.rows == len(texts)
    return [int(text.split()[-1]) for text in texts]


def test_the_sample_is_like_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of blocks of neighbours from all over the input, and so is its first quarter."""
    rows = sampled(tmp_path, 20_000, monkeypatch)
    assert len(rows) == 512
    assert len(set(rows)) == 512
    blocks = [rows[at : at + BLOCK_ROWS] for at in range(0, 512, BLOCK_ROWS)]
    assert all(block == list(range(block[0], block[0] + BLOCK_ROWS)) for block in blocks)
    for part in (blocks, blocks[: len(blocks) // 4]):
        places = sorted(block[0] / 20_000 for block in part)
        gaps = [after - before for before, after in zip([0, *places], [*places, 1], strict=True)]
        assert max(gaps) < 2.5 / len(part)


def test_a_small_input_is_its_own_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows that the filter leaves, in order, where they are few."""
    rows = sampled(tmp_path, 600, monkeypatch, input={"filter": "id >= 100", "limit": 300})
    assert rows == list(range(100, 400))


@pytest.mark.parametrize("rows", [10, 600])
def test_a_prompt_without_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rows that all ask the same are sampled too, few or many, and a job on the sample sends them."""
    monkeypatch.setattr("batchrunner.tune.sample.MOST_ROWS", 512)
    job = job_of(tmp_path, rows=rows, prompt={"user": "Tell me a story."}, sampling={"temperature": 1})
    sample = take(prepare(load_job(job, environ={})), tmp_path / "tune")
    assert sample.rows == min(rows, 512)
    report = batchrunner.run(job | {"input": {"path": str(sample.path)}})
    assert report.rows_ok == sample.rows


def test_rows_that_begin_alike_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job sorts its rows by prefix the blocks are taken from the sorted order."""
    prompt = {"text": '{{ ("document %d " % (id % 40)) * 40 }}: row {{ id }}'}
    monkeypatch.setattr("batchrunner.tune.sample.MOST_ROWS", 512)
    job = load_job(job_of(tmp_path, rows=8000, prompt=prompt, order="prefix"), environ={})
    sample = take(prepare(job), tmp_path / "tune")
    documents = [row % 40 for row in pq.read_table(sample.path)["id"].to_pylist()]
    assert len(set(documents)) > 10
    assert sum(1 for _ in groupby(documents)) <= 2 * 512 / BLOCK_ROWS
    assert sorted(path.name for path in (tmp_path / "tune").iterdir()) == ["sample.parquet"]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200))
def test_blocks_are_chosen_by_length_too(sizes: list[int]) -> None:
    """Every second candidate is taken, each once, and none of the order is lost in the spreading."""
    taken = chosen(sizes)
    assert len(taken) == -(-len(sizes) // 2)
    assert sorted(set(taken)) == taken
    assert sorted(spread(taken)) == taken


def test_long_and_short_blocks_are_both_taken() -> None:
    """Of a file that turns from short to long blocks in the middle the sample has as much of each."""
    sizes = [10.0 + at % 7 for at in range(64)] + [500.0 + at % 11 for at in range(64)]
    taken = [sizes[at] for at in chosen(sizes)]
    assert sum(taken) / len(taken) == pytest.approx(sum(sizes) / len(sizes), rel=0.02)


NEW = {"schedule-conservativeness": 0.3, "max-running-requests": 256}


LINES = """\
engine:  # here
  kind: server
  args:
    max-running-requests: 8  # too few
    enable-metrics: true
# the end
"""
LINES_AFTER = """\
engine:  # here
  kind: server
  args:
    max-running-requests: 256  # too few
    enable-metrics: true
    schedule-conservativeness: 0.3
# the end
"""
ONE_LINE = """\
engine: {kind: server, model: x}  # one
window: 8
"""
ONE_LINE_AFTER = """\
engine: {kind: server, model: x, args: {schedule-conservativeness: 0.3, max-running-requests: 256}}  # one
window: 8
"""
NO_ARGS = """\
engine:
  kind: server
  model: x"""
NO_ARGS_AFTER = """\
engine:
  kind: server
  model: x
  args:
    schedule-conservativeness: 0.3
    max-running-requests: 256
"""
UNDERSCORES = """\
engine:
  args: {max_running_requests: 8, dtype: half}
  model: x
"""
UNDERSCORES_AFTER = """\
engine:
  args: {max_running_requests: 256, dtype: half, schedule-conservativeness: 0.3}
  model: x
"""
EMPTY = """\
engine:
  args: {}
  env:
    A: |
      two
      lines
"""
EMPTY_AFTER = """\
engine:
  args: {schedule-conservativeness: 0.3, max-running-requests: 256}
  env:
    A: |
      two
      lines
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LINES, LINES_AFTER),
        (ONE_LINE, ONE_LINE_AFTER),
        (NO_ARGS, NO_ARGS_AFTER),
        (UNDERSCORES, UNDERSCORES_AFTER),
        (EMPTY, EMPTY_AFTER),
    ],
)
def test_the_block_is_put_in_place(tmp_path: Path, before: str, after: str, end: str) -> None:
    """Only the values change: comments, order, style, ends of lines and other keys stay as they are."""
    path = tmp_path / "job.yaml"
    path.write_text(before, newline=end)
    apply_args(path, NEW)
    assert path.read_bytes().decode() == after.replace("\n", end)


def test_a_link_to_a_job_stays_one(tmp_path: Path) -> None:
    """What is edited is the file that the link leads to."""
    path, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    path.write_text(LINES)
    link.symlink_to(path)
    apply_args(link, NEW)
    assert link.is_symlink()
    assert path.read_text() == LINES_AFTER


@pytest.mark.parametrize(
    "text",
    [
        "engine:\n  args:\n  kind: server\n",
        "input: {path: x}\n",
        "engine: {kind: server, # why\n  model: x # because\n  }\n",
    ],
)
def test_a_file_that_cannot_be_edited_is_left(tmp_path: Path, text: str) -> None:
    """Where the block cannot be put in with certainty the file stays as it is, and the command says so."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match="put the block in by hand"):
        apply_args(path, NEW)
    assert path.read_text() == text


ARGS = st.dictionaries(
    st.from_regex(r"[a-z][a-z-]{0,10}[a-z]", fullmatch=True),
    st.one_of(
        st.integers(0, 10**6), st.floats(0, 1, width=16), st.booleans(), st.text("ab: #{}'\n", max_size=5)
    ),
    min_size=1,
    max_size=4,
)


@given(old=ARGS, new=ARGS, flow=st.booleans())
@example(old={"aa": 0}, new={"no": 0}, flow=True)  # YAML's false
def test_any_arguments_can_be_written(old: dict[str, Any], new: dict[str, Any], flow: bool) -> None:
    """Whatever the arguments are, the file says them afterwards, and all else that it said."""
    job = {"engine": {"kind": "server", "args": old, "model": "x"}, "window": 3}
    text = edited(yaml.safe_dump(job, default_flow_style=flow, sort_keys=False), new)
    assert text is not None
    job["engine"] = {"kind": "server", "args": {**old, **new}, "model": "x"}
    assert yaml.safe_load(text) == job


def test_what_is_launched_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway one replica is tuned, with its own cards; an engine in process is tuned as a server."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    args = {"mem-fraction-static": 0.8}
    gateway = {"kind": "gateway", "model": "org/name", "tp": 2, "args": args, "env": {"A": "b"}}
    replica = engine_to_tune(load_job(job_of(tmp_path, gateway), environ={}))
    assert replica.args == {**args, "tp-size": 2}
    assert replica.env == {"A": "b", "CUDA_VISIBLE_DEVICES": "4,5"}
    inside = {"kind": "inprocess", "model": "org/name", "args": args}
    assert engine_to_tune(load_job(job_of(tmp_path, inside), environ={})).args == args
    found = {"kind": "gateway", "url": "http://127.0.0.1:9"}
    with pytest.raises(
        JobError,
        match=r"engine\.kind gateway: tuning starts SGLang with other flags, and this job starts none",
    ):
        engine_to_tune(load_job(job_of(tmp_path, found), environ={}))


LOG = """
[2025-08-11 17:17:03] server_args=ServerArgs(mem_fraction_static=0.83, attention_backend='fa3', tp_size=1)
[2025-08-11 17:17:03] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.50 GB, \
mem usage=15.00 GB.
[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
[2025-08-11 17:18:03] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 0, token usage: 0.10, \
#running-req: 30, #queue-req: 117
[2025-08-11 17:18:04] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, \
gen throughput (token/s): 4594.01, #queue-req: 317
[2025-08-11 17:18:05] Decode batch, #running-req: 300, #token: 370959, token usage: 0.82, cuda graph: False, \
gen throughput (token/s): 4594.01, #queue-req: 317
"""


def test_the_log_tells_the_rest() -> None:
    """Passes, graphs and the card's spare memory are read from the lines of SGLang's own guides."""
    assert signs_at_start(LOG.splitlines()) == {
        "spare_gb": 13.5,
        "prefill_limit": 8192,
        "mem_fraction": 0.83,
        "attention_backend": "fa3",
        "model": "LlamaForCausalLM",
    }
    work = signs_of_work(LOG.splitlines(), tokens=4200)
    assert work == {"tokens_per_pass": 200.0, "prefill_per_pass": 800.0, "graph_off_share": 0.5}
    several = signs_of_work([line for line in LOG.splitlines() if "Decode" in line] * 3, tokens=0)
    assert (several["running"], several["usage"]) == (266.5, 0.82)
    rates = [line for line in LOG.splitlines() if "Decode" in line] * 3
    faster = [line.replace("4594.01", "9188.02") for line in rates]
    idle = rates[0].replace("4594.01", "4.20")  # before the first rows there were none
    assert output_rate([idle, *rates]) == 4594.01
    assert output_rate([idle, *faster, *rates]) == pytest.approx(
        4594.01 * 4 / 3, abs=0.1
    )  # by time, not lines
    assert output_rate(rates[:2]) is None
    on_cpu = signs_of_work(LOG.replace("cuda graph", "cpu graph").splitlines(), tokens=0)
    assert on_cpu["graph_off_share"] is None
