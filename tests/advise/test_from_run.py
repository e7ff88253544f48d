"""Advice on our own runs, whatever became of them, and on live servers, ours or not."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import socketserver
import threading
import tracemalloc
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from batchrunner.advise.advise import Judgement, advise, advise_run
from batchrunner.advise.rules.table import apply_all
from batchrunner.advise.situation import Situation
from batchrunner.api import run
from batchrunner.core.errors import InputError
from batchrunner.engines.flags import Flags
from batchrunner.engines.logs.series import Series
from batchrunner.engines.logs.signs import LoadSample
from batchrunner.engines.logs.thresholds import Thresholds
from tests.conftest import batchrun, eventually, job_of, started, write_job
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import launchable
from tests.support.sglang_logs import LogWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

QUICK = Thresholds(span_s=0.2, samples=3)
"""For servers that a test watches: it has no ten seconds."""


@pytest.fixture(autouse=True)
def no_sglang_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed SGLang, whose --help takes seconds."""
    monkeypatch.setattr("batchrunner.advise.advise.installed", lambda _: Flags())


def changes(judgement: Judgement) -> dict[str, str]:
    return {advice.rule: advice.change for advice in judgement.advice if advice.change}


def a_run(directory: Path, **changes: Any) -> Path:
    """Return a real run's output path; its story is for the tests to rewrite."""
    job = job_of(directory, rows=30, **changes)
    run(job)
    return Path(job["output"]["path"])


def tell(path: Path, samples: int = 60, *, torn: bool = False, **values: Any) -> None:
    """Write the events of a start whose samples have these values."""
    load = {"running": 100, "queue": 300, "token_usage": 0.95, "max_running": 256, "scheduler": "engine"}
    load |= {name: values.pop(name) for name in list(values) if name in load}
    lines = [{"time": 1000.0, "elapsed_s": 0.0, "event": "start", "rows_total": 9000}]
    for number in range(samples):
        sample = {
            "time": 1000.0 + number, "elapsed_s": number, "event": "sample",
            "rows_total": 9000, "rows_done": 10, "rows_per_s": 5.0,
            "output_tokens_per_s": 900.0, "window": 400, "in_flight": 400, "resting": 0,
            "retractions": 0, "signals": [load], "bands": {},
        }  # fmt: skip
        lines.append({**sample, **values})
    text = b"\n".join(map(orjson.dumps, lines)) + b"\n"
    path.write_bytes(text[:-40] if torn else text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with FakeSGLang() as server:
        directory = tmp_path_factory.mktemp("finished")
        return a_run(directory, engine={"kind": "attach", "urls": [server.url]})


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of a run that ended, for a test to change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def with_job(own: Path, **values: Any) -> None:
    facts = json.loads((own / "run.json").read_text())
    facts["job"] |= values
    (own / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("values", "job", "expected"),
    [
        ({"in_flight": 400}, {"window": 400}, "`window: auto` instead of 400"),
        ({"in_flight": 400}, {}, "`queue`: a higher band"),
        ({"in_flight": 40}, {}, "more of the machine: cores for rendering"),
        ({"in_flight": 40, "resting": 300}, {}, "why the engine refuses rows"),
        ({"in_flight": 400, "running": 20}, {}, "--tokenizer-worker-num 4"),
    ],
)
def test_what_in_the_client_is_too_slow(
    values: dict[str, Any], job: dict[str, Any], expected: str, own: Path
) -> None:
    """An empty queue is our own fault while rows are left: the samples tell which part of us it is."""
    with_job(own, **job)
    tell(own / "events.jsonl", queue=0, running=values.pop("running", 250), **values)
    found = advise(str(own))
    assert expected in changes(found)["queue-empty"]
    assert "while rows were left to send" in found.lines()[1]


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("server", {"tokenizer_worker_num": 1}, "--tokenizer-worker-num 4"),
        ("server", {}, "`engine: {kind: gateway}`: servers with a front process each"),
        ("server", {"tokenizer_worker_num": 4}, "`engine: {kind: gateway}`"),
        ("inprocess", {"tokenizer_worker_num": 1}, "`engine: {kind: gateway}`"),
    ],
)
def test_the_front_process_may_be_too_slow(
    kind: str, arguments: dict[str, int], expected: str, own: Path
) -> None:
    """It is given workers where this version of SGLang has them, and there is one."""
    with_job(own, engine={"kind": kind})
    LogWriter().started(**arguments).write(own, "engine-server.log")
    tell(own / "events.jsonl", queue=0, running=20, in_flight=400)
    assert changes(advise(str(own)))["queue-empty"].startswith(expected)


def test_connections_may_be_what_limits(own: Path) -> None:
    """A window that has all connections that the machine allows cannot grow."""
    facts = json.loads((own / "run.json").read_text())
    facts["engine"]["connections"] = 410
    (own / "run.json").write_text(json.dumps(facts))
    tell(own / "events.jsonl", queue=0, running=390)
    assert changes(advise(str(own)))["queue-empty"] == "raise `ulimit -n`"


def test_an_empty_queue_without_rows_is_the_end(own: Path) -> None:
    """When nothing is left to send the queue is to run dry."""
    tell(own / "events.jsonl", queue=0, rows_done=8600)
    found = advise(str(own))
    assert changes(found) == {}
    assert found.healthy


def test_short_outputs_are_measured(own: Path) -> None:
    """Of a run it is known why SGLang is too conservative: the outputs' share of max_new_tokens."""
    tell(own / "events.jsonl", token_usage=0.4)
    (advice,) = [advice for advice in advise(str(own)).advice if advice.rule == "conservative"]
    assert "of max_new_tokens on average" in advice.sign
    assert "99% of the outputs have at most 5 tokens" in advice.change
    assert advice.certainty == "high"
    assert 0 < advice.evidence["output_share_of_max_new_tokens"] < 0.01


def test_outputs_that_cannot_be_shorter_are_no_reason(own: Path) -> None:
    """With ignore_eos all of max_new_tokens is made: SGLang reserves no more than will come."""
    facts = json.loads((own / "run.json").read_text())
    facts["fingerprint"]["sampling"] = {"max_new_tokens": 256, "ignore_eos": True}
    (own / "run.json").write_text(json.dumps(facts))
    tell(own / "events.jsonl", token_usage=0.4)
    assert changes(advise(str(own))) == {}


def test_the_card_of_the_run_counts(own: Path) -> None:
    """A run of ours knows its card, and advice for that card needs nobody to name it."""
    facts = json.loads((own / "run.json").read_text())
    facts["engine"]["card"] = "NVIDIA H100 80GB HBM3"
    (own / "run.json").write_text(json.dumps(facts))
    tell(own / "events.jsonl")
    LogWriter().started(attention_backend="triton").write(own, "engine-server.log")
    assert changes(advise(str(own)))["attention-backend"] == "--attention-backend fa3"


def test_the_engines_log_is_part_of_the_run(own: Path) -> None:
    """Retractions, memory and flags come from the log beside the events."""
    tell(own / "events.jsonl")
    log = LogWriter().started(gpu_gb=13.5)
    for _ in range(9):
        log.decode(4).retract()
    log.write(own, "engine-server.log")
    assert changes(advise(str(own))) == {
        "retractions": "--schedule-conservativeness 1.3",
        "memory-left": "--mem-fraction-static 0.91 (from 0.83: 6.3 GB of 78 more for the KV pool)",
    }
    found = [advice.rule for advice in advise_run(own).advice if advice.change]
    assert found == ["retractions", "memory-left"]


def test_flags_are_known_without_advice(own: Path) -> None:
    """Machines are told of whose flags it is, also where there is nothing to change."""
    tell(own / "events.jsonl")
    LogWriter().started().write(own, "engine-server.log")
    found = advise(str(own)).as_dict()
    assert found["healthy"]
    assert (found["version"], found["flags_known"]) == ("0.5.23", True)


def test_retractions_of_all_starts_count(own: Path) -> None:
    """Each start counts from nothing: their sum is over the time of all."""
    tell(own / "events.jsonl", retractions=4)
    once = (own / "events.jsonl").read_bytes()
    (own / "events.jsonl").write_bytes(once + once.replace(b'"time":1', b'"time":2'))
    found = advise(str(own))
    assert "8 retractions, 4.1 a minute, in 120 samples over 118 s" in found.lines()[1]
    assert set(changes(found)) == {"retractions"}


@pytest.mark.parametrize(
    ("start", "samples"),
    [
        ({"engine": {"max_running": 64, "max_total_tokens": 100_000}}, 120),
        ({"engine": {"max_running": 64, "max_total_tokens": 100_900}}, 120),
        ({"engine": {"max_running": 320, "max_total_tokens": 100_000}}, 60),
        ({"engine": {"max_running": 64, "max_total_tokens": 130_000}}, 60),
        ({"args": {"schedule-conservativeness": 0.3}}, 60),
        ({"event": "engine_healed", "new": {"mem-fraction-static": 0.8}}, 60),
        ({"event": "engine_recalled", "new": {"schedule-conservativeness": 1.3}}, 60),
        ({"event": "engine_recalled", "new": {"chunked-prefill-size": 4096}}, 120),
    ],
)
def test_what_servers_with_other_flags_did_is_forgotten(
    start: dict[str, Any], samples: int, own: Path
) -> None:
    """A run that was resumed or healed with other flags is judged by the server that its log describes."""
    engine = {"max_running": 64, "max_total_tokens": 100_000}
    tell(own / "events.jsonl", queue=0)
    first, *looks = map(orjson.loads, (own / "events.jsonl").read_bytes().splitlines())
    later = [{**look, "time": look["time"] + 1000} for look in looks]
    recalled = {**first, "event": "engine_recalled", "new": {"chunked-prefill-size": 4096}}
    events = [{"engine": engine} | first, recalled, *looks, {"engine": engine} | first | start, *later]
    (own / "events.jsonl").write_bytes(b"\n".join(map(orjson.dumps, events)))
    situation = advise(str(own)).situation
    assert situation.load.counted == samples
    assert situation.client is not None
    assert situation.client.dry == samples
    (own / "tasks" / "0").mkdir(parents=True)
    (own / "tasks" / "1").mkdir()
    tell(own / "tasks" / "0" / "events.jsonl", queue=0)
    (own / "events.jsonl").rename(own / "tasks" / "1" / "events.jsonl")
    assert advise(str(own)).situation.load.counted == 60 + samples  # what other tasks did is not


@pytest.mark.parametrize(("told", "per_min"), [([30, 0], 30), ([None, None], 15), ([20, None], 20)])
def test_retractions_count_where_they_were(told: list[int | None], per_min: float, own: Path) -> None:
    """Replicas of which it is known have their own; only what is nobody's is shared out."""
    load = {"running": 100, "queue": 300, "token_usage": 0.95, "max_running": 256}
    signals = [
        {**load, "scheduler": name} | ({} if count is None else {"retractions": count})
        for name, count in zip("ab", told, strict=True)
    ]
    tell(own / "events.jsonl", samples=61, retractions=sum(filter(None, told)) or 30, signals=signals)
    assert advise(str(own)).situation.retractions_per_min == per_min


def test_a_server_that_was_started_again_is_one_scheduler(own: Path) -> None:
    """Each start has its own port: a run's replicas are as many as one start has."""
    tell(own / "events.jsonl", queue=3000, scheduler="http://127.0.0.1:40001")
    once = (own / "events.jsonl").read_bytes()
    (own / "events.jsonl").write_bytes(
        once + once.replace(b'"time":1', b'"time":2').replace(b"40001", b"40002")
    )
    assert "in 100% of 120 samples over 118 s" in advise(str(own)).lines()[1]


@pytest.mark.parametrize("order", ["auto", "input"])
def test_our_own_order_is_advised(order: str, own: Path) -> None:
    """Rows that begin alike are our own order's business, never lpm's."""
    with_job(own, order=order)
    tell(own / "events.jsonl")
    LogWriter().started().prefill(30, new=3000, hit=1000).write(own, "engine-server.log")
    expected = {} if order == "auto" else {"shared-prefixes": "`order: auto`"}
    assert changes(advise(str(own))) == expected


def test_a_run_that_was_cut_off(own: Path) -> None:
    """Killed in mid-write, without a report, its log torn: what is there is judged."""
    tell(own / "events.jsonl", torn=True, token_usage=0.4)
    (own / "report.json").unlink()
    shutil.rmtree(own / "parts")
    (own / "engine-server.log").write_bytes(b"[2026-03-01 12:00")
    assert set(changes(advise(str(own)))) == {"conservative"}


def test_a_run_of_several_tasks(own: Path) -> None:
    """Each task of an array has its own story; they are judged together."""
    (own / "events.jsonl").unlink()
    for name in ("0", "1"):
        (own / "tasks" / name).mkdir(parents=True)
        tell(own / "tasks" / name / "events.jsonl", queue=3000)
    found = advise(str(own))
    assert "120 samples of 2 schedulers over 59 s" in found.lines()[0]
    assert set(changes(found)) == {"queue-deep"}


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """A run in another process can be looked at at any time."""
    with FakeSGLang(lambda _: "hold", max_running=4) as server:
        job = job_of(tmp_path, server, rows=300, window=100)
        with started("run", write_job(job, tmp_path), "--quiet"):
            eventually(lambda: len(server.sent) == 100)
            path = job["output"]["path"]
            eventually(lambda: set(changes(advise(path, QUICK))) == {"running-capped"}, every_s=0.2)


def test_of_a_simulated_run_there_is_nothing_to_say(tmp_path: Path) -> None:
    """Made-up figures are no ground for advice, in the report neither."""
    assert advise_run(a_run(tmp_path)).advice == []


@pytest.fixture
def busy() -> Iterator[FakeSGLang]:
    """A server with 4 requests running and 36 waiting, of somebody else."""
    with FakeSGLang(max_running=4, others=40, arguments={"enable_metrics": False}) as it:
        yield it


def test_a_live_server_is_watched(busy: FakeSGLang) -> None:
    """Its load, its limits and its flags are asked of it; it need not be ours."""
    found = advise(busy.url, QUICK, span_s=1.5)
    assert found.situation.load.median("queue") == 36
    assert set(changes(found)) == {"running-capped", "metrics-off"}
    assert found.flags.version == "0.5.23"


def test_a_live_servers_card_is_as_large_as_what_is_on_it() -> None:
    """Its memory is told in parts: weights, pool, graphs and what was left."""
    memory = {"weight": 15.0, "kvcache": 50.0, "startup_available": 13.5, "graph": {"decode": 0.4}}
    arguments = {"internal_states": [{"memory_usage": memory}], "mem_fraction_static": 0.83}
    arguments |= {"max_total_tokens": None}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = advise(server.url, QUICK, span_s=0.3)
    assert "from 0.83: 6.3 GB of 79 more" in changes(found)["memory-left"]


def test_a_limit_that_only_the_log_tells() -> None:
    """Of a hybrid model /v1/loads leaves out the pool of states: where it is full, no cap limits."""
    load, log = Series(Thresholds()), Series(Thresholds())
    for at in range(40):
        load.add("a", LoadSample(at, 170, 500, 0.2, 170))
    situation = Situation(load, log)
    assert "running-capped" in {advice.rule for advice in apply_all(situation, Flags())}
    for at in range(40):
        log.add("a", LoadSample(at, 170, 500, 0.98, 170))
    assert "running-capped" not in {advice.rule for advice in apply_all(situation, Flags())}


def test_limits_that_the_arguments_do_not_tell(tmp_path: Path) -> None:
    """On a GPU they are null: what the schedulers say with their load counts."""
    state = {"max_running_requests": None, "effective_max_running_requests_per_dp": 4}
    arguments = {"max_running_requests": None, "max_total_tokens": None, "internal_states": [state]}
    with FakeSGLang(max_running=4, arguments=arguments) as server:
        report = run(job_of(tmp_path, server, rows=3))
    assert report.engine["max_running"] == 4
    assert report.engine["max_total_tokens"] == 20000


def test_a_live_server_with_dp_attention() -> None:
    """Its limit is for all ranks, each of which has a part of it: the advice is on the flag."""
    state = {"effective_max_running_requests_per_dp": 4, "max_running_requests": 32}
    arguments = {"internal_states": [state], "attn_dp_size": 8, "max_running_requests": 32}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = advise(server.url, QUICK, span_s=1.5)
    (advice,) = [advice for advice in found.advice if advice.rule == "running-capped"]
    assert "as many requests run as may (4)" in advice.sign
    assert advice.args["max-running-requests"] % 8 == 0
    assert advice.args["max-running-requests"] > 32


@pytest.mark.parametrize(
    ("asked", "certainty"),
    [("--model m --attention-backend triton", "medium"), ("--model m", None), ("--config f.yaml", "low")],
)
def test_a_backend_that_sglang_chose_is_left(asked: str, certainty: str | None) -> None:
    """A live server tells what it was asked for: what it chose by itself is its business."""
    arguments = {"launch_command": f"python -m sglang.launch_server {asked}", "attention_backend": "triton"}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = advise(server.url, QUICK, span_s=0.3, card="A100").advice
    told = {advice.rule: advice.certainty for advice in found}
    assert told.get("attention-backend") == certainty


def test_a_server_that_tells_its_load_by_metrics_only() -> None:
    """Releases without /v1/loads are read by their gauges, and what counters grew by in the time counts."""
    looks = count()
    names = ("num_running_reqs", "num_queue_reqs", "token_usage", "num_retracted_requests_total")
    types = ("gauge", "gauge", "gauge", "counter")

    def metrics() -> str:
        values = (230, 400, 0.99, 7 * next(looks))
        return "".join(
            f'# TYPE sglang:{name} {kind}\nsglang:{name}{{tp_rank="0"}} {value}\n'
            for name, kind, value in zip(names, types, values, strict=True)
        )

    with FakeSGLang(arguments={"schedule_conservativeness": 1.0}) as server:
        server.polls, server.metrics = "gone", metrics
        found = advise(server.url, Thresholds(span_s=1, samples=2), span_s=4)
    assert set(changes(found)) == {"retractions"}
    assert found.situation.load.median("queue") == 400


def test_counters_of_several_ranks_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What /metrics counts is summed over data-parallel ranks, and a sample is of one of them."""
    monkeypatch.setattr("batchrunner.advise.from_server.METRICS_S", 0.2)
    looks = count()

    def metrics() -> str:
        values = {"num_running_reqs": 100, "num_queue_reqs": 9, "token_usage": 0.95, "gen_throughput": 400}
        return "".join(
            f'# TYPE sglang:{name} gauge\nsglang:{name}{{tp_rank="0",dp_rank="{rank}"}} {value}\n'
            for name, value in (values | {"num_retracted_requests_total": 4 * next(looks)}).items()
            for rank in range(8)
        )

    with FakeSGLang() as server:
        server.polls, server.metrics = "gone", metrics
        load = advise(server.url, QUICK, span_s=1.5).situation.load
    assert load.median("rate") == 400
    assert load.share("slow") == 1  # 100 requests have 400 tokens a second
    assert 0 < load.retractions_per_min == load.retractions / 8


class Slow(FakeSGLang):
    """A server that never says what its model is."""

    async def _model_info(self, request: web.Request) -> web.Response:
        await self._over.wait()
        return await super()._model_info(request)


def test_what_a_server_says_of_its_model_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to answer what does not matter is watched all the same."""
    monkeypatch.setattr("batchrunner.advise.from_server.TIMEOUT_S", 0.3)
    with Slow(max_running=4, others=40) as server:
        assert set(changes(advise(server.url, QUICK, span_s=1.5))) == {"running-capped"}


def with_gpus(own: Path, gpus: int, **arguments: Any) -> Judgement:
    """Judge a run whose server saw so many GPUs."""
    facts = json.loads((own / "run.json").read_text())
    facts["job"]["engine"]["kind"] = "server"
    facts["engine"]["gpus"] = gpus
    (own / "run.json").write_text(json.dumps(facts))
    tell(own / "events.jsonl")
    LogWriter().started(weights_gb=60, **arguments).decode(9).write(own, "engine-server.log")
    return advise(str(own))


@pytest.mark.parametrize(
    "arguments",
    [{"tp_size": 4}, {"dp_size": 4}, {"tp_size": 2, "pp_size": 2}, {"tp_size": 4, "attn_dp_size": 4}],
)
def test_gpus_in_use_are_not_idle(arguments: dict[str, Any], own: Path) -> None:
    """Tensor, pipeline and data parallelism all take GPUs, DP attention those of tensor parallelism."""
    assert "tensor-parallel" not in changes(with_gpus(own, 4, **arguments))


def test_idle_gpus_are_seen(own: Path) -> None:
    """One server that saw more GPUs than it takes leaves them idle: our gateway uses them all."""
    (advice,) = [advice for advice in with_gpus(own, 4, tp_size=2).advice if advice.change]
    assert advice.sign == "2 GPUs that the server saw are idle"
    assert "kind: gateway" in advice.change


SERVER = """
class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "m"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
    }
    def asked(self, body):
        self.answer("yes")
"""


@pytest.mark.parametrize(("given", "expected"), [({}, 3), ({"CUDA_VISIBLE_DEVICES": "1"}, None)])
def test_a_run_writes_down_the_gpus_that_its_server_saw(
    given: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice is then on the run's machine, wherever it is asked for; a job that chose some has its way."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    own = a_run(tmp_path, engine=launchable(tmp_path, SERVER, **given))
    assert json.loads((own / "run.json").read_text())["engine"]["gpus"] == expected


def test_ctrl_c_gives_what_was_seen(busy: FakeSGLang) -> None:
    """Watching ends when one has seen enough, and that is no failure."""
    with started("advise", busy.url, "--span", "600") as watching:
        eventually(lambda: busy.polled > 3)
        watching.process.send_signal(signal.SIGINT)
        assert watching.end() == 0


def test_an_idle_server_has_no_load(server: FakeSGLang) -> None:
    """Without requests there is nothing to judge, and no complaint about an empty queue."""
    found = batchrun("advise", server.url, "--span", "0.6")
    assert "no request was running" in found.stdout
    assert "#queue-req is 0" not in found.stdout


def test_a_server_that_does_not_tell_its_load() -> None:
    """An old release without metrics is not called idle: it says nothing of its load."""
    with FakeSGLang(arguments={"enable_metrics": False}) as server:
        server.polls = "gone"
        found = batchrun("advise", server.url, "--span", "0.6")
    assert "does not tell its load" in found.stdout
    assert "no request was running" not in found.stdout
    assert "--enable-metrics" in found.stdout


@pytest.mark.parametrize(
    "told",
    [
        {"internal_states": 5},
        {"internal_states": [{"memory_usage": 5}], "architectures": "Llama"},
        {"architectures": 5, "max_running_requests": "64", "tp_size": [1], "cuda_graph_max_bs": "x"},
    ],
)
def test_a_server_that_answers_oddly(told: dict[str, Any]) -> None:
    """What is no number is not counted with; the load is judged all the same."""
    with FakeSGLang(max_running=4, others=40, arguments=told) as server:
        found = advise(server.url, Thresholds(span_s=0.1, samples=2), span_s=1)
    assert set(changes(found)) - {"metrics-off"} <= {"running-capped"}
    assert found.situation.load.median("queue") == 36


def test_an_endless_answer_is_not_read_to_its_end() -> None:
    """What streams without end is no SGLang, and takes no memory to find out."""

    class Endless(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    self.request.sendall(b"x" * (1 << 20))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracemalloc.start()
        try:
            with pytest.raises(InputError, match="not an SGLang server"):
                advise(f"http://127.0.0.1:{server.server_address[1]}", span_s=0.1)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
            server.shutdown()


def test_a_silent_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and says nothing is told from one that is not there."""
    monkeypatch.setattr("batchrunner.advise.from_server.TIMEOUT_S", 0.3)
    words = r"no server answers there: no answer within 0\.3 s"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match=words):
        advise(f"http://127.0.0.1:{silent.getsockname()[1]}", span_s=0.1)


def test_the_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a key is asked with SGLANG_API_KEY, and says so without."""
    with FakeSGLang(api_key="secret") as server:
        refused = batchrun("advise", server.url, "--span", "0.1")
        assert refused.exit_code == 2
        assert "set SGLANG_API_KEY" in refused.stderr
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        assert batchrun("advise", server.url, "--span", "0.1").exit_code == 0


def test_what_is_not_sglang_is_refused() -> None:
    """A web site, a closed port, a name that is none: one line and exit 2."""
    with FakeSGLang(is_sglang=False) as site, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for url, words in [
            (site.url, "not an SGLang server"),
            (f"http://127.0.0.1:{bound.getsockname()[1]}", "no server answers there"),
            ("http://nowhere.invalid:1", "no server answers there"),
            ("http://", "no server answers there"),
        ]:
            result = batchrun("advise", url, "--span", "0.1")
            assert result.exit_code == 2
            assert words in result.stderr
            assert result.stderr.count("\n") == 1
