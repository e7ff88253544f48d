"""The load out of log lines of every generation of SGLang."""

from __future__ import annotations

import pytest

from batchrunner.engines.logs.reader import LogLoad

URL = "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("line", "running", "queue", "usage", "tokens"),
    [
        (
            ("[2026-11-21 12:00:00 TP0] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, "
            "cuda graph: True, gen throughput (token/s): 4594.01, #queue-req: 317"),
            233, 317, 0.82, 370959,
        ),
        (
            ("[2025-02-01 12:00:00 TP0] Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, "
            "gen throughput (token/s): 4594.01, #queue-req: 317,"),
            233, 317, 0.82, 370959,
        ),
        (
            ("[2026-11-21 12:00:00] Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, "
            "token usage: 0.00, #running-req: 7, #queue-req: 0, #pending-token: 0, cuda graph: False, "
            "input throughput (token/s): 0.84"),
            7, 0, 0.0, None,
        ),
        (
            ("[2024-12-01 12:00:00 TP0] Prefill batch. #new-seq: 3, #new-token: 4096, #cached-token: 12, "
            "cache hit rate: 11.56%, token usage: 0.44, #running-req: 20, #queue-req: 1200"),
            20, 1200, 0.44, None,
        ),
        (
            ("[12:00:00 TP0] Prefill batch(mixed #running-req: 12). #new-seq: 3, #new-token: 4096, "
            "#cached-token: 12, cache hit rate: 11.56%, #queue-req: 9"),
            12, 9, 0.0, None,
        ),
        (
            ("[2026-11-21 12:00:00] Decode batch, #running-req: 9, #full token: 100, full token usage: 0.31, "
            "#swa token: 90, swa token usage: 0.97, mamba num: 9, mamba usage: 0.20, accept len: 2.31, "
            "cpu graph: False, gen throughput (token/s): 44.10, #queue-req: 5"),
            9, 5, 0.97, None,
        ),
    ],
)  # fmt: skip
def test_lines_of_all_generations(
    line: str, running: int, queue: int, usage: float, tokens: int | None
) -> None:
    """Pairs come and go and change places; those that matter are found."""
    load = LogLoad(URL)
    load.read([line])
    (found,) = load.loads()
    assert (found.running, found.queue, found.token_usage, found.used_tokens) == (
        running,
        queue,
        usage,
        tokens,
    )
    assert (found.scheduler, found.source) == (URL, "log")


@pytest.mark.parametrize("others", ["TP0", "PP0 ATTN_CP0 MOE_DP1 TP0 EP0"])
def test_limits_and_ranks(others: str) -> None:
    """The limits stand in a line at the start; each DP rank has its own lines, whatever else it is."""
    load = LogLoad(URL)
    load.read(
        line.replace("TP0", others)
        for line in (
            (
                "[2026-11-21 11:59:00 DP0 TP0] max_total_num_tokens=665690, chunked_prefill_size=8192, "
                "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536"
            ),
            "[2026-11-21 12:00:00 DP0 TP0] Decode batch, #running-req: 1, token usage: 0.1, #queue-req: 2",
            "[2026-11-21 12:00:00 DP1 TP0] Decode batch, #running-req: 3, token usage: 0.2, #queue-req: 4",
            "[2026-11-21 12:00:01 DP1 TP0] Decode batch, #running-req: 5, token usage: 0.2, #queue-req: 6",
        )
    )
    found = load.loads()
    assert [(s.scheduler, s.running, s.queue) for s in found] == [(f"{URL}#dp0", 1, 2), (f"{URL}#dp1", 5, 6)]
    assert {(s.max_total_tokens, s.max_running) for s in found} == {(665690, 4096)}


def test_a_line_told_again_is_no_news() -> None:
    """A log that stands still, or has half a line, gives the same reading, told from a new one."""
    load = LogLoad(URL)
    line = "[2026-11-21 12:00:00] Decode batch, #running-req: 1, token usage: 0.1, #queue-req: 2"
    load.read([line])
    first = load.loads()
    load.read(["INFO: something else", "#queue-req: 9 is not a batch line", line[:-20]])
    assert load.loads() == first
    load.read([line])
    assert load.loads() != first
