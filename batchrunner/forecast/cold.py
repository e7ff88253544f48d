"""The range of a job's time on a card, from data sheets. No engine is asked, so the range is no estimate."""

from collections.abc import Sequence
from statistics import fmean

from batchrunner.core.errors import JobError
from batchrunner.forecast.job_time import Forecast, Interval, JobRow, tokens_of
from batchrunner.sglang.model_files import (
    STATIC_SHARE,
    kv_bytes,
    model_directory,
    read_config,
    weights_bytes,
)

CARDS = {
    "A100": (80e9, 2.0e12, 312e12), "H100": (80e9, 3.35e12, 989e12), "H200": (141e9, 4.8e12, 989e12),
    "B200": (180e9, 8.0e12, 2250e12), "L40S": (48e9, 0.86e12, 362e12),
}  # fmt: skip
"""Memory in bytes, bandwidth in bytes/s and dense bf16 operations/s of each card, from its data sheet."""
READ, COMPUTED = 0.8, 0.55
"""Fractions of the memory bandwidth and of the operations/s that engines reach."""
ENDS = ((0.3, 1.0, 2e-3, 8e-6), (0.1, 0.7, 1e-3, 2e-6), (1.0, 1.5, 25e-3, 20e-6))
"""Assumptions for the median, for the low end and for the high end of the range. Each has four numbers: the
fraction of `max_new_tokens` that outputs take if they end by themselves, a factor of the time, and the
seconds that data sheets leave out for each decode pass and for each row in a pass. SGLang 0.5.16 on an H200
took 2 ms a pass with CUDA graphs and 25 ms without (docs/benchmarks.md)."""
MOST_RUNNING = 1024


def cold_forecast(
    model: str, card: str, rows: Sequence[JobRow], *, total: int, samples: int, cards: int, copies: int
) -> Forecast:
    """Return the range of the time on `copies` of the model, each on `cards` cards. Raises JobError.

    The time does not include the start of the engine. The `samples` completions of a row share its prompt.
    """
    config = read_config(model)
    weights, kv = weights_bytes(model_directory(model), config), kv_bytes(config, 2)
    if card.upper() not in CARDS:
        raise JobError(f"--cold {card}: unknown card", hint=f"give one of {', '.join(CARDS)}")
    if weights is None or kv is None:
        raise JobError(f"--cold {card}: needs the files of engine.model ({model or 'the job names none'})")
    memory, read_s, compute_s = (cards * figure for figure in CARDS[card.upper()])
    prompt = fmean(row.prompt - row.cached for row in rows)
    pool = (STATIC_SHARE * memory - weights) / kv
    seconds, outputs, passes = [], [], []
    for share, factor, pass_s, row_s in ENDS:
        output = fmean(row.asked * (1.0 if row.fixed else share) for row in rows)
        context = prompt + output
        running = min(MOST_RUNNING, total * samples / copies, pool / context)
        if running <= 0:
            raise JobError(f"--cold {card}: the weights of {model} do not fit on {cards} (engine.tp)")
        passes.append(total * samples / copies * output / running)
        reading_s = passes[-1] * (weights + running * context * kv) / read_s / READ
        # A token takes two operations for each parameter, as many as the weights have bytes.
        computing_s = total / copies * (prompt + samples * output) * weights / compute_s / COMPUTED
        seconds.append(factor * (reading_s + computing_s) + passes[-1] * (pass_s + row_s * running))
        outputs.append(samples * output)
    tokens = tokens_of(rows, total, Interval(*outputs))
    why = (
        "a range from data sheets, for outputs of 10% to 100% of max_new_tokens (100% with ignore_eos): "
        "it is not measured on an engine, and excludes the engine's start"
    )
    return Forecast(
        seconds=Interval(*seconds),
        tokens=tokens,
        passes=round(passes[0]),
        limited_by="not known",
        why=(why,),
    )
