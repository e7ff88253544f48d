"""What only a server's log tells of a trial: its forward passes, its graphs, the memory left. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchrunner.engines.batchlines import Arguments, Batch, Ready, clean, record_in

if TYPE_CHECKING:
    from collections.abc import Iterable

LOG_INTERVAL = 10
"""Trials' `decode-log-interval`: passes are counted to within 10, and a line costs next to nothing."""


def signs_at_start(lines: Iterable[str]) -> dict[str, Any]:
    """Return what the log says of the server's set-up, as fields of `Signs`."""
    found: dict[str, Any] = {}
    for line in lines:
        match record_in(clean(line)):
            case Arguments(values=values):
                found["mem_fraction"] = values.get("mem_fraction_static")
                found["attention_backend"] = values.get("attention_backend")
            case Ready(chunked_prefill_size=chunk, gpu_gb=spare_gb):
                found |= {"prefill_limit": chunk, "spare_gb": spare_gb}
    return found


def signs_of_work(lines: Iterable[str], tokens: int) -> dict[str, Any]:
    """Return what the log of a time with so many output tokens says of its passes, as fields of `Signs`."""
    batches = [record for line in lines if isinstance(record := record_in(clean(line)), Batch)]
    decodes = [batch for batch in batches if batch.decode]
    prefilled = [batch.new_tokens for batch in batches if not batch.decode]
    graphs = [batch.graph for batch in decodes if batch.graph is not None]
    passes = LOG_INTERVAL * len(decodes) + len(prefilled)
    return {
        "tokens_per_pass": round(tokens / passes, 3) if passes else None,
        "prefill_per_pass": round(sum(prefilled) / len(prefilled), 1) if prefilled else None,
        "graph_off_share": round(graphs.count(False) / len(graphs), 3) if graphs else None,
    }
