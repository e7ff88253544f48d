"""Advice on our own runs, whatever became of them, and on live servers, ours or not."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchrunner.api import run
from batchrunner.output.events import read_events
from batchrunner.output.run_dir import look_at_run
from batchrunner.output.samples import sample_of
from batchrunner.runner.advise import advise
from batchrunner.tuning.advise import advise_run
from batchrunner.tuning.from_run import ServerWatch
from tests.conftest import job_of
from tests.support.answers import Said
from tests.support.fake_sglang import FakeSGLang
from tests.support.launchable import launchable
from tests.support.sglang_logs import LogWriter, changes


def a_run(directory: Path, rows: int = 30, **changes: Any) -> Path:
    """Return a real run's output path; its story is for the tests to rewrite."""
    job = job_of(directory, rows=rows, **changes)
    run(job)
    return Path(job["output"]["path"])


def tell(path: Path, samples: int = 60, *, torn: bool = False, **values: Any) -> None:
    """Write the events of an attempt whose samples have these values; before the first, it only began."""
    load = {"running": 100, "queue": 300, "token_usage": 0.95, "max_running": 256, "scheduler": "engine"}
    load |= {name: values.pop(name) for name in list(values) if name in load}
    lines = [{"time": 1000.0, "elapsed_s": 0.0, "event": "start", "rows_total": 9000}]
    for number in range(-1, samples):
        sample: dict[str, Any] = {
            "time": 1000.0 + number, "elapsed_s": number, "event": "sample",
            "rows_total": 9000, "rows_done": 4000, "rows_failed": 0, "rows_reused": 0, "rows_per_s": 5.0,
            "time_left_s": None, "stopping": False, "output_tokens_per_s": 900.0,
            "prompt_tokens_per_s": 0.0, "cached_tokens_per_s": 0.0, "output_tokens": 0, "prompt_tokens": 0,
            "cached_tokens": 0, "window": 400, "in_flight": 400, "resting": 0, "retractions": 0,
            "signals": [load], "bands": {}, "task": "generate", "simulated": False,
        }  # fmt: skip
        sample |= values | ({"rows_done": 10, "retractions": 0} if number < 0 else {})
        sample.setdefault("unsent", 9000 - sample["rows_done"] - sample["in_flight"])
        lines.append(sample)
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


def change_facts(own: Path, section: str, **values: Any) -> None:
    """Change what run.json says of the job, the engine or the answers' fingerprint."""
    facts = json.loads((own / "run.json").read_text())
    facts[section] |= values
    (own / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("values", "job", "expected"),
    [
        ({"in_flight": 400}, {"window": 400}, "`window: auto` instead of 400"),
        ({"in_flight": 400}, {}, "`window: 800` in the job"),
        ({"in_flight": 40}, {}, "more cores for rendering and tokenizing"),
        ({"in_flight": 40, "resting": 300}, {}, "why the engine refuses rows"),
        ({"in_flight": 400, "running": 20}, {}, "--tokenizer-worker-num 4"),
    ],
)
def test_what_in_the_client_is_too_slow(
    values: dict[str, Any], job: dict[str, Any], expected: str, own: Path
) -> None:
    """An empty queue is our own fault while rows are left: the samples tell which part of us it is."""
    change_facts(own, "job", **job)
    tell(own / "events.jsonl", queue=0, running=values.pop("running", 250), **values)
    found = advise(str(own))
    assert expected in changes(found)["queue-empty"]
    assert "while rows were left to send" in found.lines()[1]


@pytest.mark.parametrize(("asked", "advised"), [(4, True), (32, False)])
def test_an_attached_server_whose_memory_is_the_cap(tmp_path: Path, asked: int, *, advised: bool) -> None:
    """A run writes down that its server runs fewer requests than were asked for: no advice asks for more."""
    state = {"effective_max_running_requests_per_dp": 4}
    arguments = {"internal_states": [state], "max_running_requests": asked}
    with FakeSGLang(max_running=4, arguments=arguments) as server:
        own = a_run(tmp_path, engine={"kind": "attach", "urls": [server.url]})
    tell(own / "events.jsonl", queue=300, running=4, max_running=4, token_usage=0.3)
    assert ("running-capped" in changes(advise(str(own)))) == advised


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tokenizer_worker_num": 1}, "--tokenizer-worker-num 4"),
        ({}, "`engine.replicas`: several servers, each with its own front process"),
        ({"tokenizer_worker_num": 1, "device": "cpu"}, "a machine with more cores"),
        (
            {"tokenizer_worker_num": 4, "enable_http_worker_reuseport": False},
            "--enable-http-worker-reuseport",
        ),
        ({"tokenizer_worker_num": 4, "detokenizer_worker_num": 1}, "--detokenizer-worker-num 4"),
    ],
)
def test_the_front_process_may_be_too_slow(arguments: dict[str, Any], expected: str, own: Path) -> None:
    """It is given workers where this version of SGLang has them, and there is one."""
    change_facts(own, "job", engine={"kind": "server"})
    LogWriter().started(**arguments).write(own, "engine-server.log")
    tell(own / "events.jsonl", queue=0, running=20, in_flight=400)
    assert changes(advise(str(own)))["queue-empty"].startswith(expected)


@pytest.mark.parametrize(
    ("prompt", "advised"),
    [
        ({"user": "$text"}, True),
        ({"user": "$text", "images": {"columns": ["picture"]}}, False),
        ({"messages": "chat"}, False),
    ],
)
def test_a_job_without_images_needs_no_encoder(prompt: dict[str, Any], own: Path, *, advised: bool) -> None:
    """A model that takes images can leave their part out, unless prompts have some, or may have some."""
    change_facts(own, "fingerprint", prompt=prompt)
    model = "Load weight end. elapsed=9 s, type=DeepseekV4ForCausalLM, avail mem=40.0 GB, mem usage=30.00 GB."
    log = LogWriter().started(language_model_only=False).say(model)
    log.decode(9).write(own, "engine-server.log")
    tell(own / "events.jsonl")
    expected = {"encoder-unused": "--language-model-only"} if advised else {}
    assert changes(advise(str(own))) == expected


def test_images_are_read_by_more_threads(own: Path) -> None:
    """A front process that is too slow with images gets threads to read them first."""
    change_facts(own, "fingerprint", prompt={"user": "$text", "images": {"columns": ["picture"]}})
    LogWriter().started(mm_io_worker_num=0, tokenizer_worker_num=1).write(own, "engine-server.log")
    tell(own / "events.jsonl", queue=0, running=20, in_flight=400)
    assert changes(advise(str(own)))["queue-empty"] == "--mm-io-worker-num 16"


def test_connections_may_be_what_limits(own: Path) -> None:
    """A window that has all connections that the machine allows cannot grow."""
    change_facts(own, "engine", connections=410)
    tell(own / "events.jsonl", queue=0, running=390)
    assert changes(advise(str(own)))["queue-empty"] == "raise `ulimit -n`"


@pytest.mark.parametrize(
    "values",
    [
        {"rows_done": 8600},  # all rows are sent
        {"rows_done": 8900, "in_flight": 91, "unsent": 9},  # fewer are left than the window takes
        {"in_flight": 120, "unsent": 0},  # a stop was asked for
        {"rows_done": 60},  # fewer have ended than run at once
    ],
    ids=["end", "tail", "stopped", "start"],
)
@pytest.mark.parametrize("load", [{"queue": 0}, {"token_usage": 0.4}], ids=["empty", "conservative"])
def test_start_drain_and_tail_do_not_count(load: dict[str, Any], values: dict[str, Any], own: Path) -> None:
    """A queue that is empty, or a pool that is not full, is no sign then: what is left may be too short."""
    tell(own / "events.jsonl", **load, **values)
    LogWriter().started(chunk=512).prefill(20, new=512).decode(20, g=False).write(own, "engine-server.log")
    found = advise(str(own))
    assert found.advice == []
    assert not found.healthy
    assert "advice needs 8 samples over 10 s" in found.lines()[0]


def test_servers_that_died_fill_up_again(own: Path) -> None:
    """After a death a server is as empty as at the start."""
    tell(own / "events.jsonl", token_usage=0.4, rows_done=4050)
    start, first, *steady = (own / "events.jsonl").read_bytes().splitlines()
    died = b'{"event": "engine_died", "time": 1000, "elapsed_s": 1}'
    (own / "events.jsonl").write_bytes(b"\n".join([start, first, died, *steady]))
    assert changes(advise(str(own))) == {}


def test_lengths_of_outputs_are_measured(own: Path) -> None:
    """A run tells why SGLang is too conservative, but for outputs that cannot be shorter (`ignore_eos`)."""
    tell(own / "events.jsonl", token_usage=0.4)
    (advice,) = [advice for advice in advise(str(own)).advice if advice.rule == "conservative"]
    assert "of max_new_tokens on average" in advice.sign
    assert "99% of the outputs have at most 5 tokens" in advice.change
    assert "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=5 in the server's environment" in advice.change
    assert advice.certainty == "high"
    change_facts(own, "fingerprint", sampling={"max_new_tokens": 256, "ignore_eos": True})
    assert changes(advise(str(own))) == {}


@pytest.mark.parametrize(
    ("start", "samples"),
    [
        ({"engine": {"max_running": 64, "max_total_tokens": 100_900}}, 120),
        ({"engine": {"max_running": 320, "max_total_tokens": 100_000}}, 60),
        ({"args": {"schedule-conservativeness": 0.3}}, 60),
        ({"event": "engine_healed", "new": {"mem-fraction-static": 0.8}}, 60),
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
    (own / "tasks" / "0").mkdir(parents=True)
    (own / "tasks" / "1").mkdir()
    (own / "events.jsonl").rename(own / "tasks" / "0" / "events.jsonl")
    (own / "tasks" / "1" / "events.jsonl").write_bytes(b"\n".join(map(orjson.dumps, events)))
    found = advise(str(own)).situation
    assert found.load.counted == 60 + samples  # what other tasks did is not forgotten
    assert found.client is not None
    assert found.client.empty == 60 + samples


@pytest.mark.parametrize(
    ("order", "expected"), [("auto", {}), ("input", {"shared-prefixes": "`order: auto`"})]
)
def test_our_own_order_is_advised(order: str, expected: dict[str, str], own: Path) -> None:
    """Rows that begin alike are our own order's business, never lpm's."""
    change_facts(own, "job", order=order)
    tell(own / "events.jsonl")
    LogWriter().started().prefill(30, new=3000, hit=1000).write(own, "engine-server.log")
    assert changes(advise(str(own))) == expected


def test_a_run_that_was_cut_off(own: Path) -> None:
    """Killed in mid-write, without a report, its log torn: what is there is judged."""
    tell(own / "events.jsonl", torn=True, token_usage=0.4)
    (own / "report.json").unlink()
    shutil.rmtree(own / "parts")
    (own / "engine-server.log").write_bytes(b"[2026-03-01 12:00")
    assert set(changes(advise(str(own)))) == {"conservative"}


def test_of_a_simulated_run_there_is_nothing_to_say(tmp_path: Path) -> None:
    """Made-up figures are no ground for advice: neither the command nor the report has any."""
    run = a_run(tmp_path)
    tell(run / "events.jsonl", token_usage=0.4)
    for found in (advise(str(run)), advise_run(run)):
        assert found.advice == []
        assert not found.healthy
        assert "there is no advice on simulated figures" in found.lines()[0]


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        ({"tp_size": 2}, True),
        ({"dp_size": 4}, False),
        ({"tp_size": 2, "pp_size": 2}, False),
        ({"tp_size": 4, "attn_dp_size": 4}, False),
    ],
)
def test_idle_gpus_are_seen(arguments: dict[str, Any], own: Path, *, idle: bool) -> None:
    """One server that saw more GPUs than it takes leaves them idle: replicas use them all."""
    change_facts(own, "job", engine={"kind": "server"})
    change_facts(own, "engine", gpus=4)
    tell(own / "events.jsonl")
    LogWriter().started(weights_gb=60, **arguments).decode(9).write(own, "engine-server.log")
    signs = [advice.sign for advice in advise(str(own)).advice if "replicas: auto" in advice.change]
    assert signs == (["2 GPUs that the server could use are idle"] if idle else [])


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


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ({"input_share": 0.1, "sorted_share": 0.6}, True),
        ({"input_share": 0.01, "sorted_share": 0.02}, False),
    ],
)
def test_what_the_cache_could_serve_is_read(shares: dict[str, Any], own: Path, *, named: bool) -> None:
    """A run's own look at its rows tells that a cache which is off would pay."""
    LogWriter().started(disable_radix_cache=True).decode(30).write(own, "engine-server.log")
    tell(own / "events.jsonl")
    with (own / "events.jsonl").open("ab") as log:
        log.write(orjson.dumps({"time": 1000.0, "elapsed_s": 0.0, "event": "order", **shares}) + b"\n")
    assert ("cache-off" in changes(advise(str(own)))) is named


def test_each_window_of_a_watch_counts_afresh(own: Path) -> None:
    """A new window forgets what the client did in the last one, and judging a window reads no file."""
    log = LogWriter().started().decode(30).write(own, "engine-server.log")
    tell(own / "events.jsonl", samples=40, queue=0)
    samples = [sample for event in read_events(own / "events.jsonl") if (sample := sample_of(event))]
    watch = ServerWatch(look_at_run(own), "engine", log, since=0)
    for begins_at in (0, 100):
        watch.begin()
        for number, sample in enumerate(samples):
            if number % 10 == 0:  # it logs on
                log.write_text(log.read_text() + LogWriter().decode(5).text())
            sample.output_tokens = 100 * (begins_at + number)
            watch.take(sample, begins_at + number)
        assert watch.busy_s
    hidden = own.rename(own.with_name("elsewhere"))
    client = watch.situation.client
    hidden.rename(own)
    assert client is not None
    assert client.empty == 40
    assert client.longest_output == 5


TEMPLATES = [
    f"The patient of room {number} is in a stable condition, and the next visit of the doctor will be on day "
    f"{number * 7 % 31} of the month."
    for number in range(120)
]


STATES = (
    "Mamba Cache is allocated. max_mamba_cache_size: 490, conv_state size: 0.60GB, ssm_state size: 23.40GB "
)


@pytest.mark.parametrize(
    ("running", "sampling", "card", "pool", "advised"),
    [
        (16, {}, "NVIDIA H100 80GB HBM3", (), True),
        (250, {}, "NVIDIA H100 80GB HBM3", (), False),
        (16, {"min_p": 0.1}, "NVIDIA H100 80GB HBM3", (), False),
        (16, {}, "AMD Instinct MI300X", (), False),
        (16, {}, "NVIDIA H100 80GB HBM3", (STATES,), False),
    ],
)
def test_answers_that_repeat_each_other_can_be_drafted(
    running: int, sampling: dict[str, Any], card: str, pool: Sequence[str], tmp_path: Path, *, advised: bool
) -> None:
    """N-gram speculation is advised for small batches, if it changes no answers on this card.

    A hybrid model would need a state for each drafted token.
    """
    with FakeSGLang(lambda sent: Said(TEMPLATES[sent.row])) as server:
        own = a_run(
            tmp_path, rows=len(TEMPLATES), sampling=sampling, engine={"kind": "attach", "urls": [server.url]}
        )
    change_facts(own, "engine", card=card)
    arguments: dict[str, Any] = {
        "speculative_algorithm": None,
        "speculative_ngram_external_sam_budget": 0,
    }
    log = LogWriter().started(most=256, before_ready=pool, **arguments)
    log.decode(30, r=running, u=0.5).write(own, "engine-server.log")
    tell(own / "events.jsonl", queue=120, running=running, max_running=256, token_usage=0.95)
    found = changes(advise(str(own))).get("answers-repeat", "")
    assert found.startswith("--speculative-algorithm NGRAM --max-running-requests 16") == advised


def test_a_watch_replays_the_answers_of_its_run(tmp_path: Path) -> None:
    """Flag tuning learns the card from the run, and what n-gram speculation would gain from its answers."""
    with FakeSGLang(lambda sent: Said(TEMPLATES[sent.row])) as server:
        own = a_run(tmp_path, rows=len(TEMPLATES), engine={"kind": "attach", "urls": [server.url]})
    change_facts(own, "engine", card="NVIDIA H100 80GB HBM3")
    log = LogWriter().started(most=256, speculative_algorithm=None).decode(30, r=16).write(own, "engine.log")
    tell(own / "events.jsonl", samples=40, running=16)
    watch = ServerWatch(look_at_run(own), "engine", log, since=0)
    for number, event in enumerate(read_events(own / "events.jsonl")):
        if (sample := sample_of(event)) is not None:
            log.write_text(log.read_text() + LogWriter().decode(1, r=16).text())
            sample.output_tokens = 100 * number
            watch.take(sample, float(number))
    assert watch.situation.server.ngram_speedup > 2
