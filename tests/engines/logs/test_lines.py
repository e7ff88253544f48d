"""What single lines of an SGLang log say."""

from __future__ import annotations

import pytest

from batchrunner.engines.logs.lines import LoggedBatch, ServerReady, origin_of, record_in


@pytest.mark.parametrize(
    ("line", "running", "queue", "usage", "tokens"),
    [
        (
            ("[2026-11-21 12:00:00 TP0] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, "
            "cuda graph: True, gen throughput (token/s): 4594.01, #queue-req: 317"),
            233, 317, 0.82, 370959,
        ),
        (
            ("[2026-11-21 12:00:00] Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, "
            "token usage: 0.00, #running-req: 7, #queue-req: 0, #pending-token: 0, cuda graph: False, "
            "input throughput (token/s): 0.84"),
            7, 0, 0.0, None,
        ),
        (
            ("[2026-11-21 12:00:00] Decode batch, #running-req: 9, #full token: 100, full token usage: 0.31, "
            "#swa token: 90, swa token usage: 0.97, mamba num: 9, mamba usage: 0.20, accept len: 2.31, "
            "cpu graph: False, gen throughput (token/s): 44.10, #queue-req: 5"),
            9, 5, 0.97, None,
        ),
    ],
)  # fmt: skip
def test_the_pairs_of_a_batch_line(
    line: str, running: int, queue: int, usage: float, tokens: int | None
) -> None:
    """Pairs come and go and change places; those that matter are found."""
    found = record_in(line)
    assert isinstance(found, LoggedBatch)
    assert (found.running, found.queue, found.usage, found.tokens) == (running, queue, usage, tokens)


@pytest.mark.parametrize("others", ["TP0", "PP0 ATTN_CP0 MOE_DP1 TP0 EP0"])
def test_limits_and_ranks(others: str) -> None:
    """The limits stand in a line at the start; the DP rank is told from the other ranks."""
    line = (
        f"[2026-11-21 11:59:00 DP1 {others}] max_total_num_tokens=665690, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB"
    )
    assert record_in(line) == ServerReady(665690, 8192, 4096, 65536, gpu_gb=13.5)
    assert origin_of(line).dp == "1"


@pytest.mark.parametrize("line", ["INFO: something else", "#queue-req: 9 is not a batch line", ""])
def test_other_lines_say_nothing(line: str) -> None:
    """So does a batch line that was cut off before its queue."""
    assert record_in(line) is None
    assert record_in("[2026-11-21 12:00:00] Decode batch, #running-req: 1, token usage: 0.1, #queue-") is None
