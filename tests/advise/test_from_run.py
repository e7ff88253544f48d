"""Advice on our own runs, whatever became of them, and on live servers, ours or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchrunner.advise.advise import AdviceReport, advise, advise_run
from batchrunner.api import run
from tests.conftest import eventually, job_of, started, write_job
from tests.support.advice import QUICK, changes
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import launchable
from tests.support.sglang_logs import LogWriter


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
        ("server", {"tokenizer_worker_num": 1, "device": "cpu"}, "a machine with more cores"),
    ],
)
def test_the_front_process_may_be_too_slow(
    kind: str, arguments: dict[str, Any], expected: str, own: Path
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
    """A run tells why SGLang is too conservative: the share of max_new_tokens that outputs use."""
    tell(own / "events.jsonl", token_usage=0.4)
    (advice,) = [advice for advice in advise(str(own)).advice if advice.rule == "conservative"]
    assert "of max_new_tokens on average" in advice.sign
    assert "99% of the outputs have at most 5 tokens" in advice.change
    assert "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=5 in the server's environment" in advice.change
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
    assert situation.client.empty == samples
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


def with_gpus(own: Path, gpus: int, **arguments: Any) -> AdviceReport:
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
    assert advice.sign == "2 GPUs that the server could use are idle"
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
