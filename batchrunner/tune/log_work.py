"""What only a server's log tells of a trial: its forward passes, its graphs, the memory left. Pure."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from batchrunner.engines.logs.lines import clean, origin_of, record_in
from batchrunner.engines.logs.records import Arguments, LoggedBatch, ServerReady, WeightsLoaded

if TYPE_CHECKING:
    from collections.abc import Iterable

LOG_INTERVAL = 10
"""Trials' `decode-log-interval`: passes are counted to within 10, and a line costs next to nothing."""
FEWEST_DECODES = 5
"""Lines of decode passes that make a mean."""


def signs_at_start(lines: Iterable[str]) -> dict[str, Any]:
    """Return what the log says of the server's set-up, until its first pass, as fields of `Signs`."""
    found: dict[str, Any] = {}
    for line in lines:
        match record_in(clean(line)):
            case Arguments(values=values):
                found["mem_fraction"] = values.get("mem_fraction_static")
                found["attention_backend"] = values.get("attention_backend")
            case WeightsLoaded(model=str(model)):
                found["model"] = model
            case ServerReady(chunked_prefill_size=chunk, gpu_gb=spare_gb):
                found |= {"prefill_limit": chunk, "spare_gb": spare_gb}
            case LoggedBatch():
                break
    return found


def signs_of_work(lines: Iterable[str], tokens: int) -> dict[str, Any]:
    """Return what the log of a time with so many output tokens says of its passes, as fields of `Signs`.

    Running and usage are those of decode passes: polls see many a prefill, in which fewer run.
    """
    told = [
        (line, record) for line in map(clean, lines) if isinstance(record := record_in(line), LoggedBatch)
    ]
    batches = [batch for _, batch in told]
    decodes = [batch for batch in batches if batch.decode]
    prefilled = [batch.new_tokens for batch in batches if not batch.decode]
    graphs = [batch.graph for batch in decodes if batch.graph is not None]
    passes = LOG_INTERVAL * len(decodes) + len(prefilled)
    found: dict[str, Any] = {}
    if len(decodes) >= FEWEST_DECODES:
        ranks = len({origin_of(line).dp for line, _ in told})
        found["running"] = round(ranks * fmean(batch.running for batch in decodes), 1)
        found["usage"] = round(fmean(batch.usage for batch in decodes), 3)
    return found | {
        "tokens_per_pass": round(tokens / passes, 3) if passes else None,
        "prefill_per_pass": round(fmean(prefilled), 1) if prefilled else None,
        "graph_off_share": round(graphs.count(False) / len(graphs), 3) if graphs else None,
    }


def output_rate(lines: Iterable[str]) -> float | None:
    """Return a time's output tokens a second, by the scheduler's own clock; None where few passes decode.

    Rows that end tell it later and less exactly: at either end of the time many are half done. Each line
    tells its rate since the one before, prefills included, and for how many passes it stands: means are
    weighted by the time that is. The first one's is of time before this, perhaps without work.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    tokens: defaultdict[str, float] = defaultdict(float)
    count = 0
    for line in map(clean, lines):
        record = record_in(line)
        if isinstance(record, LoggedBatch) and record.decode and record.throughput:
            rank = origin_of(line).dp
            if rank not in tokens:
                tokens[rank] = 0.0
                continue
            seconds[rank] += record.running / record.throughput
            tokens[rank] += record.running
            count += 1
    if count < FEWEST_DECODES:
        return None
    return round(sum(tokens[rank] / seconds[rank] for rank in seconds if seconds[rank]), 2)
