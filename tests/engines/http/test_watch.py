"""Advice on live servers, ours or not."""

import os
import signal
import socket
from itertools import count
from typing import Any

import pytest

from batchrunner.core.errors import InputError
from batchrunner.core.timing import TIMING
from batchrunner.runner.advise import advise
from batchrunner.tuning.advise import AdviceReport
from batchrunner.tuning.signals import GUIDES
from tests.conftest import batchrun, eventually, started
from tests.support.fake_sglang import FakeSGLang
from tests.support.server_thread import PATIENCE_S
from tests.support.sglang_logs import changes


def end_after(server: FakeSGLang, polls: int = 8) -> None:
    """Let whoever watches a server have seen enough when its load was asked for so often: by a Ctrl-C."""
    looks = count(1)

    def look() -> None:
        if next(looks) == polls:
            os.kill(os.getpid(), signal.SIGINT)

    server.on_poll = look


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is watched for a fraction of a second is judged."""
    monkeypatch.setattr(GUIDES, "span_s", 0.1)
    monkeypatch.setattr(GUIDES, "samples", 2)


def watched(server: FakeSGLang, *, polls: int = 8, user: str = "", **options: Any) -> AdviceReport:
    """Return the advice on a server whose load was asked for so often, however slow the machine is."""
    end_after(server, polls)
    return advise(server.url.replace("://", f"://{user}"), span_s=PATIENCE_S, **options)


def test_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the address of a server behind a proxy, and goes before a key in the environment."""
    monkeypatch.setenv("SGLANG_API_KEY", "another")
    with FakeSGLang() as server:
        found = watched(server, user="joe:hunter2@")
    assert "//***@127" in "\n".join(found.lines())
    assert "hunter2" not in f"{found.lines()}{found.as_dict()}"


def test_a_live_server_is_watched() -> None:
    """Its load, its limits, its flags and its memory, told in parts, are asked of it; it need not be ours."""
    memory = {"weight": 15.0, "kvcache": 50.0, "startup_available": 13.5, "graph": {"decode": 0.4}}
    arguments = {"internal_states": [{"memory_usage": memory}], "mem_fraction_static": 0.83}
    arguments |= {"max_total_tokens": None, "enable_metrics": False}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = watched(server)
    assert found.situation.load.median("queue") == 36
    assert found.flags.version == "0.5.23"
    assert set(changes(found)) == {"running-capped", "metrics-off", "memory-left"}
    assert "instead of 0.83: 6.3 GB more for the KV pool (the GPU has 79 GB)" in changes(found)["memory-left"]


def test_a_live_server_with_dp_attention() -> None:
    """Its limit is for all ranks, each of which has a part of it: the advice is on the flag."""
    state = {"effective_max_running_requests_per_dp": 4, "max_running_requests": 32}
    arguments = {"internal_states": [state], "attn_dp_size": 8, "max_running_requests": 32}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = watched(server)
    (advice,) = [advice for advice in found.advice if advice.rule == "running-capped"]
    assert "all 4 allowed requests run" in advice.sign
    assert advice.args["max-running-requests"] % 8 == 0
    assert advice.args["max-running-requests"] > 32


@pytest.mark.parametrize(
    ("asked", "state"),
    [(32, {}), (None, {"max_mamba_cache_size": 20})],
    ids=["fewer than were asked for", "a hybrid model's states"],
)
def test_a_live_server_whose_memory_is_the_cap(asked: int | None, state: dict[str, Any]) -> None:
    """Where memory already allows fewer requests than the flag asks for, a higher value is no advice."""
    state |= {"effective_max_running_requests_per_dp": 4, "max_running_requests": asked}
    arguments = {"internal_states": [state], "max_running_requests": asked}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = watched(server)
    assert "running-capped" not in changes(found)


def test_a_live_server_whose_state_pool_is_the_cap() -> None:
    """Its load leaves the states out: what it tells of itself says how many requests they allow."""
    pool = {"max_mamba_cache_size": 20, "mamba_radix_cache_strategy": "extra_buffer"}
    unset = dict.fromkeys(("max_running_requests", "max_mamba_cache_size", "mamba_full_memory_ratio"))
    unset |= {"mamba_ssm_dtype": None, "disable_radix_cache": False}
    state = {"effective_max_running_requests_per_dp": 4, "memory_usage": {"kvcache": 10.0}} | pool
    strategy = {"mamba_radix_cache_strategy": "extra_buffer"}
    with FakeSGLang(
        max_running=4, others=40, arguments={"internal_states": [state]} | unset | strategy
    ) as server:
        found = watched(server)
    assert found.situation.load.median("state_usage") == 1
    assert "of 20 states, 5 for each request, is the limit" in next(
        advice.sign for advice in found.advice if advice.rule == "states-full"
    )
    assert changes(found)["states-full"].startswith(
        "--mamba-radix-cache-strategy extra_buffer_lazy --mamba-full"
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [("--model m --attention-backend triton", True), ("--model m", False), ("--config f.yaml", True)],
)
def test_a_backend_that_sglang_chose_is_left(asked: str, *, told: bool) -> None:
    """A live server tells what it was asked for: what it chose by itself is its business."""
    arguments = {"launch_command": f"python -m sglang.launch_server {asked}", "attention_backend": "triton"}
    with FakeSGLang(max_running=4, others=40, arguments=arguments) as server:
        found = watched(server, polls=2, card="A100").advice
    assert ("attention-backend" in {advice.rule for advice in found}) == told


def test_ctrl_c_gives_what_was_seen() -> None:
    """Watching ends when one has seen enough, and that is no failure."""
    with FakeSGLang(max_running=4, others=40) as busy, started("advise", busy.url, "--span", "600") as watch:
        eventually(lambda: busy.polled > 3)
        watch.process.send_signal(signal.SIGINT)
        assert watch.end() == 0


def test_an_idle_server_has_no_load(server: FakeSGLang) -> None:
    """Without requests there is nothing to judge, and no complaint about an empty queue."""
    end_after(server)
    found = batchrun("advise", server.url, "--span", "600")
    assert "no request was running" in found.stdout
    assert "#queue-req is 0" not in found.stdout


def test_a_server_that_does_not_tell_its_load() -> None:
    """An old release without metrics is not called idle: it says nothing of its load."""
    with FakeSGLang(arguments={"enable_metrics": False}) as server:
        server.polls = "gone"
        end_after(server)
        found = batchrun("advise", server.url, "--span", "600")
    assert "does not report its load" in found.stdout
    assert "--enable-metrics" in found.stdout


def test_a_silent_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and says nothing is told from one that is not there."""
    monkeypatch.setattr(TIMING, "advise_timeout", 0.3)
    words = r"no server answers: no answer within 0\.3 s"
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
            (f"http://127.0.0.1:{bound.getsockname()[1]}", "no server answers"),
            ("http://nowhere.invalid:1", "no server answers"),
            ("http://", "no server answers"),
        ]:
            result = batchrun("advise", url, "--span", "0.1")
            assert result.exit_code == 2
            assert words in result.stderr
            assert result.stderr.count("\n") == 1
