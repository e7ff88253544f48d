"""Figures of a trial that only the server's log has: forward passes, graphs, memory left. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from batchrunner.engines.logs.lines import clean, origin_of, record_in
from batchrunner.engines.logs.records import Arguments, LoggedBatch, ServerReady, WeightsLoaded
from batchrunner.engines.simulation.replica import PassWork
from batchrunner.tune.measurement import PassSpan

LOG_INTERVAL = 10
"""`decode-log-interval` of trials, in passes: they are counted to within 10, at almost no cost."""
FEWEST_DECODES = 5
"""Log lines of decode passes that a mean needs at least."""
MOST_SPANS = 40
"""Stretches of passes of a trial that are kept."""


def signs_at_start(lines: Iterable[str]) -> dict[str, Any]:
    """Return the server's setup, from the log up to its first pass, as fields of TrialSigns."""
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


def signs_of_passes(lines: Iterable[str], tokens: int) -> dict[str, Any]:
    """Return figures of the passes in a stretch of the log, as fields of TrialSigns.

    `tokens` are the output tokens of that stretch. `running` and `usage` are means over decode passes: polls
    see prefills too, during which fewer requests run.
    """
    batch_lines = [
        (line, record) for line in map(clean, lines) if isinstance(record := record_in(line), LoggedBatch)
    ]
    batches = [batch for _, batch in batch_lines]
    decodes = [batch for batch in batches if batch.decode]
    prefilled = [batch.new_tokens for batch in batches if not batch.decode]
    graphs = [batch.graph for batch in decodes if batch.graph is not None]
    passes = LOG_INTERVAL * len(decodes) + len(prefilled)
    found: dict[str, Any] = {}
    if len(decodes) >= FEWEST_DECODES:
        ranks = len({origin_of(line).dp for line, _ in batch_lines})
        found["running"] = round(ranks * fmean(batch.running for batch in decodes), 1)
        found["usage"] = round(fmean(batch.usage for batch in decodes), 3)
    return found | {
        "tokens_per_pass": round(tokens / passes, 3) if passes else None,
        "prefill_per_pass": round(fmean(prefilled), 1) if prefilled else None,
        "graph_off_share": round(graphs.count(False) / len(graphs), 3) if graphs else None,
    }


def output_rate(lines: Iterable[str]) -> float | None:
    """Return output tokens a second by the scheduler's clock; None where the log has few decode passes.

    Counting the rows that end would be later and less exact, as many rows are half done at either end of the
    stretch. Each line has the rate since the line before, prefills included. The mean weights each rate by
    its time. The first line is left out: its rate is of the time before this stretch.
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
            seconds[rank] += record.running * record.accepted / record.throughput
            tokens[rank] += record.running * record.accepted
            count += 1
    if count < FEWEST_DECODES:
        return None
    return round(sum(tokens[rank] / seconds[rank] for rank in seconds if seconds[rank]), 2)


def spans_of(lines: Iterable[str]) -> tuple[PassSpan, ...]:
    """Return the work and the seconds of the passes between lines of decode passes.

    Empty where several schedulers share the log: their passes take turns on no common clock.
    """
    spans: list[PassSpan] = []
    ranks: set[str] = set()
    before: LoggedBatch | None = None
    prefills: list[LoggedBatch] = []
    for line in map(clean, lines):
        record = record_in(line)
        if not isinstance(record, LoggedBatch):
            continue
        ranks.add(origin_of(line).dp)
        if not record.decode:
            prefills.append(record)
            continue
        if before is not None and record.throughput:
            spans.append(_span(before, record, prefills))
        before, prefills = record, []
    if len(ranks) != 1:
        return ()
    together = len(spans) // MOST_SPANS + 1
    return tuple(_joined(spans[at : at + together]) for at in range(0, len(spans), together))


def _span(before: LoggedBatch, after: LoggedBatch, prefills: list[LoggedBatch]) -> PassSpan:
    """Return the stretch between two lines; a throughput leaves out the first token of each output."""
    samples = LOG_INTERVAL * (before.running + after.running) / 2
    tokens = samples * after.accepted
    kv_tokens = LOG_INTERVAL * ((before.tokens or 0) + (after.tokens or 0)) / 2
    work = PassWork(
        LOG_INTERVAL,
        len(prefills),
        samples + sum(batch.new_seqs for batch in prefills),
        kv_tokens,
        sum(batch.new_tokens for batch in prefills),
        tokens,
    )
    return PassSpan(work, tokens / (after.throughput or 1.0))


def _joined(spans: list[PassSpan]) -> PassSpan:
    total = PassWork(*map(sum, zip(*(span.work for span in spans), strict=True)))
    return PassSpan(total, round(sum(span.seconds for span in spans), 4))
