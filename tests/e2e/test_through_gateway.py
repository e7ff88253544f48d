"""Rows that go through a real Model Gateway, `smg`, whose workers are stand-ins for SGLang."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import AnotherModelError
from batchrunner.core.timing import TIMING
from batchrunner.job.call import job_of_batch
from batchrunner.report.report import Report
from tests.conftest import (
    eventually,
    job_of,
    log_of,
    results_of,
    rows_in,
    run_job,
    started,
    write_job,
    write_rows,
)
from tests.support.answers import Said
from tests.support.fake_sglang import Behaviour, FakeSGLang, Sent
from tests.support.real_gateway import KEY_VARIABLE, RealGateway, two_workers
from tests.support.server_thread import PATIENCE_S

pytestmark = [
    *(pytest.mark.gateway, pytest.mark.filterwarnings("default")),
    pytest.mark.usefixtures("quiet_fakes"),
]


@pytest.fixture(scope="module")
def keyed() -> Iterator[RealGateway]:
    """A gateway that keeps rows with one routing key on one worker."""
    gateway = RealGateway("--policy", "consistent_hashing", "--disable-retries", "--disable-circuit-breaker")
    yield gateway
    gateway.end()


@pytest.fixture(scope="module")
def unkeyed() -> Iterator[RealGateway]:
    """A gateway that takes its workers in turn."""
    gateway = RealGateway("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker")
    yield gateway
    gateway.end()


@pytest.fixture(scope="module")
def reading() -> Iterator[RealGateway]:
    """A gateway that reads requests to choose their worker, as by default."""
    gateway = RealGateway("--policy", "cache_aware", "--disable-retries", "--disable-circuit-breaker")
    yield gateway
    gateway.end()


@pytest.fixture
def workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RealGateway, FakeSGLang, FakeSGLang]]:
    """The gateway that the test names, and two workers on its list."""
    gateway: RealGateway = request.getfixturevalue(getattr(request, "param", "keyed"))
    with two_workers(gateway, monkeypatch) as workers:
        yield gateway, *workers


Workers = tuple[RealGateway, FakeSGLang, FakeSGLang]


def through(gateway: RealGateway) -> dict[str, Any]:
    return {"kind": "gateway", "url": gateway.url, "route": "gateway"}


def rows_at(worker: FakeSGLang) -> list[str]:
    """Return the prompts of the rows that reached a worker, without the requests that look for keys."""
    return [sent.prompt for sent in worker.sent if "row" in sent.prompt]


def batch_of(directory: Path, gateway: RealGateway, *lines: tuple[str, dict[str, Any]]) -> Report:
    """Run a batch file with requests of these endpoints and bodies through a gateway."""
    requests = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(lines)
    ]
    path = directory / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    base = write_job({"engine": through(gateway)}, directory)
    job = job_of_batch(str(path), str(directory / "run"), engine=[str(base)], overrides=[])
    return batchrunner.run(job)


@pytest.mark.parametrize("workers", ["keyed", "unkeyed"], indirect=True)
@pytest.mark.parametrize("prompt", [{"text": "text"}, {"user": "{{ text }}"}])
def test_rows_go_through(tmp_path: Path, workers: Workers, prompt: dict[str, str]) -> None:
    """Texts and chats are answered by both workers, once each, and a line says which way they go and why."""
    gateway, one, two = workers
    job = job_of(tmp_path, through(gateway), rows=60, prompt=prompt, window=8)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 60, 0)
    assert rows_in(job) == list(range(60))
    assert Counter(rows_at(one) + rows_at(two)).most_common(1)[0][1] == 1
    assert min(len(rows_at(one)), len(rows_at(two))) > 10
    assert (report.engine["kind"], report.engine["model"]) == ("gateway", "fake/model")
    assert any(f"rows go through the gateway {gateway.url}" in note for note in report.engine["notes"])


@pytest.mark.parametrize("workers", ["unkeyed"], indirect=True)
@pytest.mark.parametrize("on_repetition", ["auto", "stop"])
def test_no_answer_is_watched(tmp_path: Path, workers: Workers, on_repetition: str) -> None:
    """The gateway would forward an event for each token. A job that demands it is told in a line."""
    gateway, *servers = workers
    job = job_of(
        tmp_path, through(gateway), rows=4, prompt={"text": "text"}, on_repetition=on_repetition,
        sampling={"max_new_tokens": 4096},
    )  # fmt: skip
    outcome = run_job(job, tmp_path)
    is_told = "go on to max_new_tokens: the gateway drops stream_interval" in outcome.stderr
    assert is_told == (on_repetition == "stop")
    assert not any("stream" in sent.body for server in servers for sent in server.sent)


@pytest.mark.parametrize("workers", ["unkeyed"], indirect=True)
def test_a_thinking_budget_that_workers_would_ignore(tmp_path: Path, workers: Workers) -> None:
    """A request of a batch file that has one fails with the reason, and is not sent."""
    gateway, *servers = workers
    chats = [
        {"model": "fake/model", "messages": [{"role": "user", "content": f"row {row}"}], **more}
        for row, more in enumerate(({"reasoning": {"max_tokens": 50}}, {}))
    ]  # fmt: skip
    report = batch_of(tmp_path, gateway, *(("/v1/chat/completions", chat) for chat in chats))
    assert (report.rows_ok, report.rows_failed) == (1, 1)
    assert "max_thinking_tokens: the server runs without --reasoning-parser" in str(report.failures)
    assert [prompt for server in servers for prompt in rows_at(server)] == ["row 1"]


PARAMETERS: dict[str, Any] = {
    "logit_bias": {"5": -100.0}, "stop_regex": "a+", "spaces_between_special_tokens": False,
    "structural_tag": '{"structures": [], "triggers": []}',
}  # fmt: skip
"""Sampling parameters that a gateway drops from requests to `/generate` if it reads them."""


@pytest.mark.parametrize("workers", ["reading", "keyed"], indirect=True)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_sampling_parameter_that_the_gateway_may_drop(tmp_path: Path, workers: Workers, name: str) -> None:
    """It reaches the workers unchanged, or the job is refused before a row is sent."""
    gateway, *servers = workers
    job = job_of(tmp_path, through(gateway), rows=4, sampling={name: PARAMETERS[name]})
    is_dropped = gateway.reads_requests
    error = run_job(job, tmp_path, code=2 if is_dropped else 0).stderr
    sent = [sent for server in servers for sent in server.sent if "row" in sent.prompt]
    if is_dropped:
        assert f"sampling.{name}: the engine does not support this: the gateway reads requests" in error
        assert not sent
    else:
        assert [row.body["sampling_params"][name] for row in sent] == [PARAMETERS[name]] * 4


@pytest.mark.parametrize("workers", ["reading"], indirect=True)
def test_chats_of_a_gateway_that_reads_requests(tmp_path: Path, workers: Workers) -> None:
    """Parameters that it passes in chats reach the workers, and values that it refuses end the start."""
    gateway, *servers = workers
    chat = {"prompt": {"user": "{{ text }}"}}
    sampling = {name: PARAMETERS[name] for name in ("logit_bias", "stop_regex")}
    report = batchrunner.run(job_of(tmp_path, through(gateway), rows=4, **chat, sampling=sampling))
    assert (report.exit_code, report.rows_ok) == (0, 4)
    sent = [sent.body for server in servers for sent in server.sent if "messages" in sent.body]
    assert [{name: body[name] for name in sampling} for body in sent] == [sampling] * 4
    changes: list[tuple[dict[str, Any], str]] = [
        ({"sampling": {"n": 16}}, "sampling.n: the engine takes at most 10 in a chat"),
        ({"sampling": {"stop": list("abcde")}}, "sampling.stop: the engine takes at most 4 in a chat"),
        (
            {"output": {"columns": ["top_logprobs"], "top_logprobs": 30}},
            "output.top_logprobs: the engine takes at most 20 in a chat",
        ),
        (
            {"sampling": {"structural_tag": PARAMETERS["structural_tag"]}},
            "sampling.structural_tag: the engine does not support this: the gateway reads requests",
        ),
    ]
    for change, error in changes:
        job = job_of(tmp_path, through(gateway), rows=4, **chat, **change)
        assert error in run_job(job, tmp_path, "--fresh", code=2).stderr
    assert len([sent for server in servers for sent in server.sent if "messages" in sent.body]) == 4


@pytest.mark.parametrize("workers", ["reading"], indirect=True)
def test_limits_of_chats_are_none_for_texts(tmp_path: Path, workers: Workers) -> None:
    """Texts may have more completions than chats, also if a function makes them."""
    sampling = {"n": 16, "stop": list("vwxyz")}
    prompts: list[dict[str, Any]] = [{"text": "text"}, {"python": lambda row: str(row["text"])}]
    for number, prompt in enumerate(prompts):
        output = {"path": str(tmp_path / str(number))}
        job = job_of(tmp_path, through(workers[0]), rows=3, prompt=prompt, sampling=sampling, output=output)
        report = batchrunner.run(job)
        assert (report.exit_code, report.rows_ok) == (0, 3)
        assert {len(row["output"]) for row in results_of(job)} == {16}


@pytest.mark.parametrize("workers", ["reading"], indirect=True)
def test_a_function_that_sets_what_the_gateway_drops(tmp_path: Path, workers: Workers) -> None:
    """Only the row fails, and is not sent, because the job itself does not have the parameter."""
    gateway, *servers = workers

    async def talk(row: dict[str, Any], generate: Any) -> dict[str, str]:
        bias = {"5": 1.0} if row["id"] == 1 else None
        return {"said": (await generate(row["text"], logit_bias=bias)).text}

    job = job_of(tmp_path, through(gateway), rows=3, prompt={"rollout": talk})
    report = batchrunner.run(job)
    assert (report.rows_ok, report.rows_failed) == (2, 1)
    assert "sampling.logit_bias: the gateway reads requests" in str(report.failures)
    assert sorted(prompt for server in servers for prompt in rows_at(server)) == ["row 0", "row 2"]


@pytest.mark.parametrize("workers", ["reading", "keyed"], indirect=True)
def test_an_adapter_that_a_batch_file_names(tmp_path: Path, workers: Workers) -> None:
    """It answers chats and completions, and requests for which SGLang would ignore it are refused."""
    gateway, *servers = workers
    model = "fake/model:adapter"
    report = batch_of(
        tmp_path, gateway,
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "row 0"}]}),
        ("/v1/completions", {"model": model, "prompt": "row 1"}),
        ("/v1/responses", {"model": model, "input": "row 2"}),
    )  # fmt: skip
    assert (report.rows_ok, report.rows_failed) == (2, 1)
    assert "/v1/responses takes no LoRA adapter through a gateway" in str(report.failures)
    bodies = [sent.body for server in servers for sent in server.sent if "row" in sent.prompt]
    assert [(body["model"], body["lora_path"]) for body in bodies] == [("fake/model", "adapter")] * 2


def test_scores_in_a_batch_file(tmp_path: Path, workers: Workers) -> None:
    """The gateway has no path for them, so that each fails with a reason that names another way."""
    gateway, *servers = workers
    report = batch_of(
        tmp_path, gateway,
        ("/v1/score", {"model": "m", "query": "row 0", "items": ["a"], "label_token_ids": [1]}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "row 1"}]}),
    )  # fmt: skip
    assert (report.rows_ok, report.rows_failed) == (1, 1)
    assert "a gateway does not pass on /v1/score: set engine.route: workers" in str(report.failures)
    assert [prompt for server in servers for prompt in rows_at(server)] == ["row 1"]


@pytest.mark.usefixtures("full_requests")
@pytest.mark.parametrize("workers", ["unkeyed"], indirect=True)
@pytest.mark.parametrize("documents", [12, 240])
def test_rows_with_a_prefix_are_requests_of_their_own(
    tmp_path: Path, workers: Workers, documents: int
) -> None:
    """A gateway that chooses the worker by the prompt looks at the first prompt of a request only."""
    ids = [[row % documents] * 300 + [row] for row in range(240)]
    path = write_rows(tmp_path / "ids.parquet", len(ids), ids=ids)
    job = job_of(
        tmp_path, through(workers[0]), input={"path": str(path)}, prompt={"input_ids": "ids"}, window=64,
        bundle=8, sampling={"max_new_tokens": 16},
    )  # fmt: skip
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 240, 0)
    assert (report.bundles["most_rows"] == 1) == (documents == 12)


@pytest.mark.usefixtures("full_requests")
def test_rows_with_a_prefix_stay_on_one_worker(tmp_path: Path, workers: Workers) -> None:
    """The groups are shared out evenly, although the gateway's own ring of hashes would not do that."""
    gateway, *servers = workers
    for server in servers:  # an idle one would take groups from the other
        server.delay_s = 0.1
    ids = [[document] * 300 + [row] for row in range(240) for document in [row % 12]]
    path = write_rows(tmp_path / "ids.parquet", len(ids), ids=ids)
    job = job_of(
        tmp_path, through(gateway), input={"path": str(path)}, prompt={"input_ids": "ids"}, window=64,
        bundle=8, sampling={"max_new_tokens": 16},
    )  # fmt: skip
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 240, 0)
    assert [row["output"] for row in results_of(job)] == [f"answer 0 to {row}" for row in ids]
    assert report.bundles["most_rows"] > 1
    at = [
        {sent.body["input_ids"][0] for sent in worker.sent if "input_ids" in sent.body} for worker in servers
    ]
    assert at[0] | at[1] >= set(range(12))
    assert len(at[0]) + len(at[1]) <= 16  # one group may move at the end; the search for keys sends token 1
    assert min(map(len, at)) >= 5


@pytest.mark.parametrize("workers", ["keyed", "unkeyed"], indirect=True)
def test_the_load_of_each_worker_is_read_from_the_gateway(tmp_path: Path, workers: Workers) -> None:
    """The windows follow the requests that the gateway counts at each worker."""
    gateway, one, two = workers
    one.delay_s = two.delay_s = 0.05
    job = job_of(tmp_path, through(gateway), rows=600)
    report = batchrunner.run(job)
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 600, 0)
    schedulers = {signal["scheduler"] for sample in log_of(job, "sample") for signal in sample["signals"]}
    assert {scheduler.rpartition("#")[2] for scheduler in schedulers} == {one.url, two.url}
    running = [s["running"] for sample in log_of(job, "sample") for s in sample["signals"]]
    assert max(running) > 0


def test_auto_goes_through_where_a_worker_is_out_of_reach(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly while all workers answer here; through the gateway where one refuses our key."""
    gateway, *_ = workers
    job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=4)
    report = batchrunner.run(job)
    assert any("2 workers of the gateway" in note for note in report.engine["notes"])
    with FakeSGLang(api_key="another key") as hidden:
        unreachable = "batchrunner.engines.http.gateway._why_unreachable"
        monkeypatch.setattr(unreachable, lambda *_: _reason(hidden.url))
        job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, output={"path": str(tmp_path / "b")})
        report = batchrunner.run(job)
    note = next(note for note in report.engine["notes"] if "rows go through" in note)
    assert f"({hidden.url} cannot be reached from here)" in note
    assert report.rows_ok == 4


async def _reason(url: str) -> str:
    return f"{url} cannot be reached from here"


def test_an_attached_gateway_is_used_as_one(tmp_path: Path, workers: Workers) -> None:
    """An address of `kind: attach` at which a gateway is gets rows, and a line says so."""
    gateway, one, two = workers
    job = job_of(tmp_path, {"kind": "attach", "urls": [gateway.url]}, rows=40, window=8)
    result = run_job(job, tmp_path, code=0)
    assert f"{gateway.url} is a Model Gateway: it is used as `engine: {{kind: gateway}}`" in result.stderr
    assert rows_in(job) == list(range(40))
    assert len(rows_at(one)) + len(rows_at(two)) == 40


@pytest.mark.usefixtures("quick_retries")
def test_the_gateways_own_limits_fail_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that its queue refuses (429) or lets wait too long (503) are sent again until an answer."""
    gateway = RealGateway(
        *("--policy", "consistent_hashing", "--max-concurrent-requests", "2", "--queue-size", "2"),
        *("--queue-timeout-secs", "1"),
    )
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    try:
        with FakeSGLang(api_key=gateway.key) as one, FakeSGLang(api_key=gateway.key) as two:
            gateway.use(one.url, two.url)
            one.delay_s = two.delay_s = 0.05
            job = job_of(tmp_path, through(gateway), rows=60, window=16, limits={"max_attempts": 1})
            report = batchrunner.run(job)
            assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 60, 0)
            assert Counter(rows_at(one) + rows_at(two)).most_common(1)[0][1] == 1
    finally:
        gateway.end()


@pytest.mark.usefixtures("quick_retries")
def test_a_failing_row_opens_the_circuit_breaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row ends with its own error, the others are answered, and a line says what the gateway does."""
    gateway = RealGateway(
        *("--policy", "consistent_hashing", "--cb-failure-threshold", "1"),
        *("--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    )
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)

    def fails_one(sent: Sent) -> Behaviour:
        return "broken 500" if sent.prompt == "row 3" else "answer"

    with (
        FakeSGLang(fails_one, api_key=gateway.key) as one,
        FakeSGLang(fails_one, api_key=gateway.key) as two,
    ):
        gateway.use(one.url, two.url)
        job = job_of(tmp_path, through(gateway), limits={"max_attempts": 2})
        try:
            result = run_job(job, tmp_path, code=3)
        finally:
            gateway.end()
    rows = results_of(job)
    assert [row["row"] for row in rows if row["error"]] == [3]
    assert rows[3]["error"].startswith("500: ")
    assert "Failed rows have opened its circuit breaker" in result.stderr


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("policy", ["consistent_hashing", "round_robin"])
def test_the_gateway_dies_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Rows wait for it, and it may have forgotten which key leads where."""
    gateway = RealGateway("--policy", policy)
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    with (
        FakeSGLang(api_key=gateway.key) as one,
        FakeSGLang(api_key=gateway.key) as two,
        ThreadPoolExecutor(1) as thread,
    ):
        gateway.use(one.url, two.url)
        one.delay_s = two.delay_s = 0.02
        restarting: list[Future[None]] = []

        def restart() -> None:
            gateway.restart()
            gateway.use(one.url, two.url)

        def script(_: Sent) -> Behaviour:
            if len(one.sent) > 50 and not restarting:
                restarting.append(thread.submit(restart))
            return "answer"

        one.script = script
        job = job_of(tmp_path, through(gateway), rows=400, window=8, limits={"max_attempts": 1})
        report = batchrunner.run(job)
        restarting[0].result()
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 400, 0)
        assert rows_in(job) == list(range(400))
    gateway.end()


@pytest.mark.usefixtures("quick_retries")
def test_a_worker_comes_and_another_goes(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is registered gets a key and rows, one that is removed gets none any more."""
    monkeypatch.setattr(TIMING, "load_poll", 0.05)
    gateway, one, two = workers
    one.delay_s = two.delay_s = 0.02
    with FakeSGLang(api_key=gateway.key) as third, ThreadPoolExecutor(1) as thread:
        third.delay_s = 0.02
        changing: list[Future[None]] = []

        def change() -> None:
            gateway.use(one.url, two.url, third.url)
            eventually(lambda: len(rows_at(third)) > 20)
            gateway.use(two.url, third.url)

        def script(_: Sent) -> Behaviour:
            if len(rows_at(one)) > 10 and not changing:
                changing.append(thread.submit(change))
            return "answer"

        one.script = script
        job = job_of(tmp_path, through(gateway), rows=900, window=12, limits={"max_attempts": 1})
        report = batchrunner.run(job)
        changing[0].result()
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 900, 0)
        assert rows_in(job) == list(range(900))
        assert len(rows_at(third)) > 50
        gateway.use()


def test_a_worker_of_another_model(tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another name it gets no row and the run goes on; under the same name the run ends."""
    monkeypatch.setattr(TIMING, "load_poll", 0.05)
    gateway, one, two = workers
    one.delay_s = two.delay_s = 0.02
    with FakeSGLang(model="fake/other", api_key=gateway.key) as other, ThreadPoolExecutor(1) as thread:
        changing: list[Future[None]] = []

        def script(_: Sent) -> Behaviour:
            if len(rows_at(one)) > 10 and not changing:
                changing.append(thread.submit(gateway.use, one.url, two.url, other.url))
            return "answer"

        one.script = script
        job = job_of(tmp_path, through(gateway), rows=300, window=8)
        report = batchrunner.run(job)
        changing[0].result()
        assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 300, 0)
        assert not rows_at(other)
        gateway.use()


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("policy", ["consistent_hashing", "round_robin"])
def test_another_model_takes_the_address_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The gateway does not notice it; the run stores none of its answers, and ends."""
    gateway = RealGateway(
        *("--policy", policy, "--disable-retries", "--disable-circuit-breaker"),
        *("--disable-worker-overload-protection", "--load-monitor-interval", "1"),
    )
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    with FakeSGLang(api_key=gateway.key) as one, ThreadPoolExecutor(1) as thread:
        two = FakeSGLang(api_key=gateway.key)
        port = two.__enter__().url.rpartition(":")[2]
        other = FakeSGLang(lambda _: Said("of another model"), api_key=gateway.key, port=int(port))
        other.weights_gb = 30.0
        gateway.use(one.url, two.url)
        eventually(lambda: gateway.reporting() == {one.url, two.url})
        replacing: list[Future[Any]] = []

        def replace() -> None:
            two.__exit__()
            eventually(lambda: not one.sent or len(one.sent) > 60)
            other.__enter__()

        def script(sent: Sent) -> Behaviour:
            if len(rows_at(one)) > 20 and not replacing:
                replacing.append(thread.submit(replace))
            return "answer"

        one.script = script
        one.delay_s = two.delay_s = 0.02
        job = job_of(tmp_path, through(gateway), rows=20_000, window=8, limits={"max_attempts": 2})
        try:
            with pytest.raises(AnotherModelError, match=r"the memory of the weights in GB was '15.0'"):
                batchrunner.run(job)
            replacing[0].result()
        finally:
            other.__exit__()
            gateway.end()
    outputs = [row["output"] for row in results_of(job)]
    assert len(outputs) > 60
    assert "of another model" not in outputs


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("policy", ["consistent_hashing", "round_robin"])
@pytest.mark.parametrize("restarts", [True, False])
def test_another_model_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, *, restarts: bool
) -> None:
    """A worker that is added, or a restarted gateway's only worker: none of its answers is stored."""
    gateway = RealGateway("--policy", policy, "--disable-retries", "--disable-circuit-breaker")
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    with (
        FakeSGLang(api_key=gateway.key) as one,
        FakeSGLang(
            lambda _: Said("of another model"), api_key=gateway.key, model="fake/other",
            arguments={"served_model_name": "fake/model"},
        ) as other,
        ThreadPoolExecutor(1) as thread,
    ):  # fmt: skip
        gateway.use(one.url)
        one.delay_s = 0.02
        changing: list[Future[None]] = []

        def change() -> None:
            if restarts:
                gateway.restart()
            gateway.use(other.url, *(() if restarts else (one.url,)))

        def script(_: Sent) -> Behaviour:
            if len(rows_at(one)) > 60 and not changing:
                changing.append(thread.submit(change))
            return "answer"

        one.script = script
        job = job_of(tmp_path, through(gateway), rows=20_000, window=8, limits={"max_attempts": 2})
        with pytest.raises(AnotherModelError, match="the model was 'fake/model' and is 'fake/other'"):
            batchrunner.run(job)
        changing[0].result()
        gateway.end()
    outputs = [row["output"] for row in results_of(job)]
    assert len(outputs) > 40
    assert "of another model" not in outputs


@pytest.mark.parametrize("route", ["auto", "gateway"])
def test_a_gateway_of_several_models(
    tmp_path: Path, keyed: RealGateway, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """The job names one of them, whose workers get all rows; a job that names none, or another, is told."""
    monkeypatch.setenv(KEY_VARIABLE, keyed.key)
    engine = {**through(keyed), "route": route}
    with (
        FakeSGLang(model="fake/one", api_key=keyed.key) as one,
        FakeSGLang(model="fake/two", api_key=keyed.key, max_running=5) as two,
    ):
        keyed.use(one.url, two.url)
        error = run_job(job_of(tmp_path, engine, rows=20), tmp_path, code=2).stderr
        assert "the gateway serves several models (fake/one, fake/two): set engine.model to one of" in error
        error = run_job(job_of(tmp_path, {**engine, "model": "fake/none"}), tmp_path, code=2).stderr
        assert f"engine.model: fake/none: the gateway {keyed.url} serves fake/one, fake/two" in error
        job = job_of(tmp_path, {**engine, "model": "fake/two"})
        report = batchrunner.run(job)
        keyed.use()
    assert (report.exit_code, report.rows_ok) == (0, 20)
    assert (report.engine["model"], report.engine["max_running"]) == ("fake/two", 5)
    assert (len(rows_at(one)), len(rows_at(two))) == (0, 20)


@pytest.mark.parametrize(
    ("route", "routes"), [("auto", ["{}"]), ("workers", ["{}"]), ("gateway", ["{}@0", "{}@1"])]
)
def test_a_gateway_that_lists_dp_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, routes: list[str]
) -> None:
    """With `--dp-aware`, rows go to the server's address, or through the gateway to each rank by a key."""
    gateway = RealGateway("--policy", "consistent_hashing", "--dp-aware")
    monkeypatch.setenv(KEY_VARIABLE, gateway.key)
    with FakeSGLang(api_key=gateway.key, arguments={"dp_size": 2}) as server:
        try:
            gateway.register(server.url)
            eventually(lambda: len(gateway.listed()) == 2)
            report = batchrunner.run(job_of(tmp_path, {**through(gateway), "route": route}, rows=20))
        finally:
            gateway.end()
    assert (report.exit_code, report.rows_ok) == (0, 20)
    assert sorted(report.engine["routes"]) == [each.format(server.url) for each in routes]


@pytest.mark.usefixtures("quick_retries")
def test_two_gateways_before_the_same_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs at once, each through a gateway of its own: each row is answered once."""
    options = (
        *("--policy", "consistent_hashing", "--disable-retries", "--disable-circuit-breaker"),
        *("--disable-worker-overload-protection", "--load-monitor-interval", "1"),
    )
    first, second = RealGateway(*options, key="shared"), RealGateway(*options, key="shared")
    monkeypatch.setenv(KEY_VARIABLE, "shared")
    with (
        FakeSGLang(api_key="shared") as one,
        FakeSGLang(api_key="shared") as two,
    ):
        one.delay_s = two.delay_s = 0.02
        jobs = []
        for name, gateway in (("a", first), ("b", second)):
            gateway.use(one.url, two.url)
            path = tmp_path / name
            path.mkdir()
            jobs.append(job_of(path, through(gateway), rows=300))
        with started(write_job(jobs[0], tmp_path / "a")) as other:
            assert batchrunner.run(jobs[1]).exit_code == 0
            assert other.process.wait(PATIENCE_S) == 0
        first.end()
        second.end()
        sent = Counter(rows_at(one) + rows_at(two))
    for job in jobs:
        assert rows_in(job) == list(range(300))
    assert set(sent.values()) == {2}  # both jobs have the same 300 rows
    assert len(sent) == 300


def test_what_stands_in_the_way(keyed: RealGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No workers, no gateway, a wrong key, a task that it does not pass on, background: a sentence each."""

    def said(**changes: Any) -> str:
        job = job_of(tmp_path, {**through(keyed), **changes.pop("engine", {})}, **changes)
        return run_job(job, tmp_path, code=2).stderr.splitlines()[-1]

    monkeypatch.setenv(KEY_VARIABLE, keyed.key)
    assert "the gateway has no workers" in said()
    with FakeSGLang() as server:
        assert "is not SGLang's Model Gateway" in said(engine={"url": server.url})
    with FakeSGLang(api_key=keyed.key) as worker:
        keyed.use(worker.url)
        assert "reports the load of its workers too late" in said(engine={"background": True})
        assert "does not pass on" in said(task="classify", prompt={"text": "text"})
        monkeypatch.setenv(KEY_VARIABLE, "wrong")
        assert "refuses the API key" in said()
    keyed.use()


def test_prefill_and_decode_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the gateway brings the halves together: `auto` goes through it, and one window is for both."""
    with FakeSGLang() as prefill, FakeSGLang() as decode:
        gateway = RealGateway(
            *("--pd-disaggregation", "--prefill", prefill.url, "none", "--decode", decode.url),
            *("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"),
        )
        monkeypatch.setenv(KEY_VARIABLE, gateway.key)
        try:
            eventually(lambda: gateway.listed().keys() == {prefill.url, decode.url})
            job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=60)
            report = batchrunner.run(job)
        finally:
            gateway.end()
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 60, 0)
    assert rows_in(job) == list(range(60))
    assert len(rows_at(prefill)) == len(rows_at(decode)) == 60
    note = next(note for note in report.engine["notes"] if "rows go through" in note)
    assert "only the gateway joins prefill and decode" in note
    assert "consistent_hashing" not in note  # which would be of no use
    schedulers = {signal["scheduler"] for sample in log_of(job, "sample") for signal in sample["signals"]}
    assert schedulers <= {gateway.url}


@pytest.mark.usefixtures("quick_retries")
def test_the_decode_worker_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway uses it all the time: its rows wait, and no window shrinks because of them."""
    with FakeSGLang() as prefill, ThreadPoolExecutor(1) as thread:
        decode = FakeSGLang()
        url = decode.__enter__().url
        returned = FakeSGLang(port=int(url.rpartition(":")[2]))
        gateway = RealGateway(
            *("--pd-disaggregation", "--prefill", prefill.url, "none", "--decode", url),
            *("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"),
        )
        monkeypatch.setenv(KEY_VARIABLE, gateway.key)
        replacing: list[Future[Any]] = []

        def replace() -> None:
            decode.__exit__()
            rows_before = len(rows_at(prefill))
            eventually(lambda: len(rows_at(prefill)) > rows_before + 20)  # which have no decode worker
            returned.__enter__()

        def script(_: Sent) -> Behaviour:
            if len(rows_at(decode)) > 20 and not replacing:
                replacing.append(thread.submit(replace))
            return "answer"

        decode.script = script
        try:
            eventually(lambda: gateway.listed().keys() == {prefill.url, url})
            job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=200)
            report = batchrunner.run(job)
            replacing[0].result()
        finally:
            returned.__exit__()
            gateway.end()
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 200, 0)
    assert rows_in(job) == list(range(200))
    assert report.retries > 20
    assert not [change for change in log_of(job, "window") if "502" in change["reason"]]


@pytest.mark.usefixtures("quick_retries")
def test_one_of_two_decode_workers_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway sends every other row to it in vain: they are sent again, and none ends with an error."""
    with FakeSGLang() as prefill, FakeSGLang() as decode:
        down = FakeSGLang()
        down.__enter__()
        gateway = RealGateway(
            *("--pd-disaggregation", "--prefill", prefill.url, "none", "--policy", "round_robin"),
            *("--decode", decode.url, "--decode", down.url, "--disable-retries"),
        )
        monkeypatch.setenv(KEY_VARIABLE, gateway.key)
        try:
            eventually(lambda: len(gateway.listed()) == 3)
            down.__exit__()
            job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url}, rows=40)
            report = batchrunner.run(job)
        finally:
            gateway.end()
    assert (report.exit_code, report.rows_ok, report.rows_failed) == (0, 40, 0)


def test_a_key_that_may_send_rows_and_not_list_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers and their loads are then those of `/loads`, which the gateway shows to every key."""
    with FakeSGLang() as one, FakeSGLang() as two:
        gateway = RealGateway(
            *("--policy", "consistent_hashing", "--control-plane-api-keys", "a:Admin:admin:key-of-the-admin"),
            *("--load-monitor-interval", "1", "--worker-urls", one.url, two.url),
        )
        monkeypatch.setenv(KEY_VARIABLE, gateway.key)
        try:
            eventually(lambda: gateway.reporting() == {one.url, two.url})
            job = job_of(tmp_path, {"kind": "gateway", "url": gateway.url, "route": "gateway"}, rows=40)
            report = batchrunner.run(job)
        finally:
            gateway.end()
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 40, 0)
    assert set(report.engine["routes"]) == {one.url, two.url}
    assert sorted(rows_at(one) + rows_at(two)) == sorted(f"row {n}" for n in range(40))


def test_vectors_go_through(tmp_path: Path, keyed: RealGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of texts are answered as without a gateway."""
    monkeypatch.setenv(KEY_VARIABLE, keyed.key)
    with FakeSGLang(api_key=keyed.key, arguments={"is_generation": False}) as worker:
        keyed.use(worker.url)
        job = job_of(tmp_path, through(keyed), rows=30, task="embed", prompt={"text": "text"})
        report = batchrunner.run(job)
        keyed.use()
    assert (report.exit_code, report.rows_ok, report.retries) == (0, 30, 0)
    assert all(row["embedding"] for row in results_of(job))
