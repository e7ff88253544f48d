"""A rough range of a job's time on a GPU, computed from data sheets without an engine (`estimate --cold`)."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

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
"""Memory in bytes, memory bandwidth in bytes/s and dense bf16 operations/s of each GPU, from its data
sheet."""
READ = 0.8
"""Fraction of the memory bandwidth that engines reach."""
COMPUTED = 0.55
"""Fraction of the operations/s that engines reach."""
MOST_RUNNING = 1024
"""Assumed limit of running requests of a scheduler."""


class Assumptions(NamedTuple):
    """Assumptions with which a job's time is computed from data sheets."""

    output_share: float
    """Fraction of `max_new_tokens` that outputs take if they end by themselves."""
    time_factor: float
    """Factor by which the computed time is multiplied."""
    pass_s: float
    """Additional time of each decode pass, in seconds."""
    row_s: float
    """Additional time of each row in a decode pass, in seconds."""


ASSUMPTIONS = (
    Assumptions(output_share=0.3, time_factor=1.0, pass_s=2e-3, row_s=8e-6),
    Assumptions(output_share=0.1, time_factor=0.7, pass_s=1e-3, row_s=2e-6),
    Assumptions(output_share=1.0, time_factor=1.5, pass_s=25e-3, row_s=20e-6),
)
"""Assumptions for the median, the low end and the high end of the range. SGLang 0.5.16 on an H200 took 2 ms a
pass with CUDA graphs and 25 ms without (docs/benchmarks.md)."""


def cold_forecast(
    model: str, card: str, rows: Sequence[JobRow], *, total: int, samples: int, cards: int, copies: int
) -> Forecast:
    """Return the range of the time of `total` rows, of which `rows` are examples. Raises JobError.

    The rows run on `copies` of the model, each on `cards` GPUs of the type `card`. The time does not include
    the start of the engine. The `samples` completions of a row share its prompt.
    """
    config = read_config(model)
    weights = weights_bytes(model_directory(model), config)
    kv_per_token = kv_bytes(config, 2)
    if card.upper() not in CARDS:
        raise JobError(f"--cold {card}: unknown GPU", hint=f"give one of {', '.join(CARDS)}")
    if weights is None or kv_per_token is None:
        raise JobError(
            f"--cold {card}: no model files on this machine ({model or 'the job names no model'})",
            hint="name the model as engine.model, and download its files",
        )
    memory, read_per_s, operations_per_s = (cards * figure for figure in CARDS[card.upper()])
    prompt = fmean(row.prompt - row.cached for row in rows)
    pool_tokens = (STATIC_SHARE * memory - weights) / kv_per_token
    rows_of_copy = total / copies
    # Engines reach only the fractions READ and COMPUTED of the data sheets' values.
    seconds, outputs, passes = [], [], []
    for assumed in ASSUMPTIONS:
        output = fmean(row.asked * (1.0 if row.fixed else assumed.output_share) for row in rows)
        context = prompt + output
        running = min(MOST_RUNNING, rows_of_copy * samples, pool_tokens / context)
        if running <= 0:
            raise JobError(
                f"--cold {card}: the weights of {model} do not fit on {cards} {card}", hint="raise engine.tp"
            )
        decode_passes = rows_of_copy * samples * output / running
        # Each decode pass reads the weights, and the KV cache of all running requests.
        reading_s = decode_passes * (weights + running * context * kv_per_token) / read_per_s / READ
        # A token takes two operations per parameter, which is one operation per byte of bf16 weights.
        operations = rows_of_copy * (prompt + samples * output) * weights
        computing_s = operations / operations_per_s / COMPUTED
        overhead_s = decode_passes * (assumed.pass_s + assumed.row_s * running)
        seconds.append(assumed.time_factor * (reading_s + computing_s) + overhead_s)
        passes.append(decode_passes)
        outputs.append(samples * output)
    why = (
        "a range from data sheets, for outputs of 10% to 100% of max_new_tokens (100% with ignore_eos): "
        "the time is not measured on an engine, and excludes the engine's start"
    )
    return Forecast(
        seconds=Interval(*seconds),
        tokens=tokens_of(rows, total, Interval(*outputs)),
        passes=round(passes[0]),
        limited_by="not known",
        why=(why,),
    )
