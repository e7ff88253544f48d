"""What a server says of itself and of its load, whatever it offers."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import EngineInfo, SchedulerLoad
from batchrunner.engines.http.server_info import counters_in, describe, in_words, loads_in
from tests.support.reader_checks import ANY_JSON, check_load, json_of, some_odd

MODEL = {"model_path": "org/model"}
SERVER: dict[str, Any] = {
    "version": "0.5.23", "sampling_defaults": "model", "max_running_requests": None,
    "max_total_num_tokens": 1000, "context_length": 4096, "chunked_prefill_size": 512,
    "internal_states": [{"effective_max_running_requests_per_dp": 8, "max_total_num_tokens": 700}] * 2,
}  # fmt: skip


def described(servers: list[dict[str, Any]], loads: Sequence[SchedulerLoad] = ()) -> EngineInfo:
    return describe(model_infos=[MODEL, MODEL], server_infos=servers, loads=loads)


def test_limits_are_summed_over_schedulers() -> None:
    """Those of a polled load come first; a sum without one of its parts would be too small."""
    loads = [SchedulerLoad(f"#dp{rank}", "loads", 0, 0, 0.0, max_running=5) for rank in range(2)]
    info = described([SERVER, SERVER], loads)
    assert (info.max_running, info.max_total_tokens) == (10, 2000)
    assert (info.model, info.version, info.context_length) == ("org/model", "0.5.23", 4096)
    silent = {**SERVER, "max_total_num_tokens": None}
    assert described([SERVER, silent]).max_total_tokens is None


def test_replicas_that_tokenize_in_two_ways_do_it_themselves() -> None:
    """Tokens that the client made would be right for one of them only."""
    alike = described([SERVER, SERVER]).tokenizing
    assert alike is not None
    assert (alike.why_server, alike.model_sampling) == (None, True)
    other = described([SERVER, {**SERVER, "tokenizer_path": "org/other"}]).tokenizing
    assert other is not None
    assert other.why_server == "the replicas' arguments differ"


URL = "http://127.0.0.1:30000"


def test_a_certificate_that_is_not_trusted() -> None:
    """The reason says how to trust it."""
    failure: Any = aiohttp.ClientConnectorCertificateError(
        Mock(host="gateway", port=443, is_ssl=True), Exception("self-signed certificate")
    )
    assert in_words(failure).endswith("; to trust its certificate, set SSL_CERT_FILE")


def load(rank: int, running: int, queue: int) -> dict[str, Any]:
    return {
        "timestamp": 1795261003.4985807, "dp_rank": rank, "num_running_reqs": running,
        "num_waiting_reqs": queue, "num_waiting_uncached_tokens": 0, "num_used_tokens": 1500,
        "num_total_tokens": 1500, "max_total_num_tokens": 20000, "max_running_requests": 32,
        "token_usage": 0.075, "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0,
    }  # fmt: skip


def test_loads_of_one_scheduler() -> None:
    """One scheduler goes by the server's address."""
    assert loads_in(json_of({"version": "0.5.23", "loads": [load(0, 30, 200)]}), URL) == [
        SchedulerLoad(
            URL,
            "loads",
            30,
            200,
            0.075,
            used_tokens=1500,
            max_total_tokens=20000,
            max_running=32,
            route=URL,
            taken_at=1795261003.4985807,
        )
    ]


def test_retractions_of_each_scheduler() -> None:
    """They are the requests retracted since the report before; a server may tell none."""
    told = [load(0, 30, 200) | {"queues": {"waiting": 200, "retracted": 3}}, load(1, 12, 0)]
    assert [s.retracted for s in loads_in(json_of({"loads": told}), URL)] == [3, None]


def test_loads_of_dp_ranks() -> None:
    """Each DP rank has a scheduler, and a name, of its own."""
    found = loads_in(json_of({"loads": [load(0, 30, 200), load(1, 12, 0)]}), URL)
    assert [(s.scheduler, s.running, s.queue) for s in found] == [
        (f"{URL}#dp0", 30, 200),
        (f"{URL}#dp1", 12, 0),
    ]


@pytest.mark.parametrize("reply", [{}, {"error": "no"}, {"loads": [{}]}, {"loads": None}, []])
def test_something_else_is_not_a_load(reply: Any) -> None:
    """A reply that is no load is an error, never a load of 0, which would look like a starving engine."""
    with pytest.raises(ValueError, match="not a load"):
        loads_in(json_of(reply), URL)


def test_counters_under_dp_attention() -> None:
    """Each DP rank is another tensor-parallel rank there; other ranks and stages of it say the same again."""
    name = "sglang:num_retracted_requests_total"
    own = [(rank, rank, 0, rank + 1) for rank in range(3)]
    text = "\n".join(
        f'{name}{{tp_rank="{tp}",dp_rank="{dp}",pp_rank="{pp}"}} {value}'
        for dp, tp, pp, value in [*own, (0, 1, 0, 99), (1, 1, 1, 98)]
    )
    assert counters_in(f"# TYPE {name} counter\n{text}\n") == {"num_retracted_requests_total": 1 + 2 + 3}


def test_text_that_is_no_metrics() -> None:
    """A web page is refused."""
    with pytest.raises(ValueError, match=r"(?i)invalid|could not|expected"):
        counters_in("<html><body>404 not found</body></html>")


@given(
    st.just(b"") | st.binary() | ANY_JSON.map(json_of)
    | some_odd([{"loads": [load(0, 3, 2)]}, {"loads": [load(0, 3, 2), load(1, 0, 0)]}]).map(json_of)
)  # fmt: skip
def test_any_load_can_be_read(reply: bytes) -> None:
    """Whatever comes is a load, or none."""
    check_load(reply)


def test_good_loads_pass_the_check() -> None:
    """The properties above are tried with loads that are read, not only with those that are refused."""
    assert check_load(json_of({"loads": [load(0, 3, 2)]}))
