"""What a job takes on a card that nobody asked: by data sheets, so a range and no estimate."""

from collections.abc import Sequence

from batchrunner.core.errors import JobError
from batchrunner.engines.model_files import STATIC_SHARE, kv_bytes, model_directory, read_config, weights_of
from batchrunner.engines.simulation.replica import CostModel
from batchrunner.engines.simulation.scheduler import SchedulerConfig
from batchrunner.forecast.job_time import Interval, JobRow, SendingForecast, Setting, job_work

CARDS = {
    "A100": (80e9, 2.0e12, 312e12), "H100": (80e9, 3.35e12, 989e12), "H200": (141e9, 4.8e12, 989e12),
    "B200": (180e9, 8.0e12, 2250e12), "L40S": (48e9, 0.86e12, 362e12), "L4": (24e9, 0.3e12, 121e12),
}  # fmt: skip
"""Memory in bytes, bytes a second, and bf16 operations a second, dense, by the data sheets."""
READ, COMPUTED = 0.8, 0.55
"""Shares of these rates that engines reach."""
SHARES = (0.3, 0.1, 1.0)
"""Shares of `max_new_tokens` that outputs take: in the middle, at least, at most."""
FASTER, SLOWER = 0.7, 1.5
"""Factors of the time at either end, for what data sheets leave out."""
MOST_RUNNING, MOST_ROWS = 1024, 5_000


def cold_forecast(
    model: str | None, card: str, rows: Sequence[JobRow], total: int, copies: int
) -> SendingForecast:
    """Return the range of the time on so many cards; raises JobError where card or model is not known."""
    config = read_config(model) if model else {}
    weights = weights_of(model_directory(model), config, {}) if model else None
    kv = kv_bytes(config, 2)
    if card not in CARDS or weights is None or kv is None:
        raise JobError(
            f"--cold {card}: needs one of {', '.join(CARDS)}, and a model whose files are here, not {model}"
        )
    memory, read_s, compute_s = CARDS[card]
    pool = round((STATIC_SHARE * memory - weights.size_bytes) / kv)
    if pool < 1:
        raise JobError(f"--cold {card}: the weights of {model} do not fit on one")
    compute = weights.size_bytes / compute_s  # two operations for each parameter, which has two bytes
    cost = CostModel(
        weights.size_bytes / read_s / READ, compute, kv / read_s / READ, compute / COMPUTED
    )  # fmt: skip
    setting = Setting(SchedulerConfig(MOST_RUNNING, pool), 1)
    share = max(1, total // copies)
    count = min(share, MOST_ROWS)
    chosen = [rows[at * len(rows) // count] for at in range(count)]
    drawn = [[(row, [max(1, round(part * row.asked))]) for row in chosen] for part in SHARES]
    works = [job_work(setting, iter(each), count).of(share, count) for each in drawn]
    middle, low, high = (cost.work_s(work) for work in works)
    outputs = Interval(*(total * sum(out[0] for _, out in each) / count for each in drawn))
    prompts, cached = (sum(column) * total / len(rows) for column in list(zip(*rows, strict=True))[1:3])
    why = "a range by data sheets, for outputs of a tenth to all of max_new_tokens: no engine was asked"
    seconds = Interval(middle, low * FASTER, high * SLOWER)
    return SendingForecast(seconds, outputs, prompts, cached, works[0].passes, "not known", (why,))
