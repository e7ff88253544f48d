"""What a terminal shows of a run: three lines at its beginning, then a bar, and the engine below it."""

from collections.abc import Sequence
from dataclasses import dataclass

from batchrunner.dispatch.progress import Snapshot, corners_line
from batchrunner.job.tasks import GENERATE
from batchrunner.report.report import duration

RED, PLAIN = "\x1b[31m", "\x1b[0m"
_BETWEEN = " · "


@dataclass(frozen=True, slots=True)
class Opening:
    """What a run is going to do, for a person who sees it begin."""

    rows: int
    """Rows to do."""
    rows_done: int
    """Rows that earlier attempts ended."""
    model: str
    """Identity of the model."""
    kind: str
    """The job's `engine.kind`."""
    window: int
    """Requests in flight at first, over all replicas."""
    is_fixed: bool
    """Whether the job sets that number."""
    results: str
    """Directory of the results."""

    def lines(self) -> list[str]:
        """Return the three lines: what, how and where."""
        before = f" ({self.rows_done:,} done before)" if self.rows_done else ""
        follows = "set by the job" if self.is_fixed else "adapted to its load"
        return [
            f"rows:    {self.rows:,} to do{before}, model {self.model}",
            f"engine:  {self.kind}, {self.window:,} requests in flight, {follows}",
            f"results: {self.results} (Ctrl-C stops; the same command resumes)",
        ]


def progress_text(snapshot: Snapshot) -> str:
    """Return what stands behind the bar: rows per second, and the time left."""
    left = "?" if snapshot.time_left_s is None else duration(snapshot.time_left_s)
    return f"rows · {snapshot.rows_per_s:.1f} rows/s · {left} left"


def engine_line(snapshot: Snapshot, columns: int, *, colours: bool) -> str:
    """Return the engine's state in one line of less than `columns` characters; failed rows are not cut.

    `#running-req` and `#queue-req` are sums over the schedulers, the band is that of each.
    """
    failed = f"{snapshot.rows_failed:,} failed"
    parts = [failed, *_engine_parts(snapshot)]
    while len(parts) > 1 and len(_BETWEEN.join(parts)) >= columns:
        parts.pop()
    text = _BETWEEN.join([*parts[1:], failed])[: columns - 1]
    if not (colours and snapshot.rows_failed):
        return text
    return f"{text.removesuffix(failed)}{RED}{failed}{PLAIN}" if text.endswith(failed) else text


def _engine_parts(snapshot: Snapshot) -> list[str]:
    """Return the parts of the line, the most important first."""
    parts = _load_parts(snapshot) if snapshot.loads else ["load unknown"]
    if snapshot.prompt_tokens_per_s > 0:
        parts.append(f"cache {min(1.0, snapshot.cached_tokens_per_s / snapshot.prompt_tokens_per_s):.0%}")
    if snapshot.waiting:
        parts.append(f"{snapshot.waiting:,} to retry")
    parts.append(f"{snapshot.in_flight:,}/{snapshot.window:,} in flight")
    if snapshot.retractions:
        parts.append(f"{snapshot.retractions:,} retracted")
    if snapshot.task == GENERATE:
        return [*parts, f"{snapshot.output_tokens_per_s:,.0f} tok/s"]
    return [*parts, f"{snapshot.prompt_tokens_per_s:,.0f} input tok/s"]


def _load_parts(snapshot: Snapshot) -> list[str]:
    loads = snapshot.loads
    band = snapshot.bands.get(loads[0].scheduler)
    found = [state["corner"] for state in snapshot.by_scheduler.values() if "corner" in state]
    corners = corners_line(found, len(loads))
    each = " each" if len(loads) > 1 else ""
    healthy = f" ({band[0]:,}-{band[1]:,}{each})" if band else ""
    return [
        f"running {sum(load.running for load in loads):,}",
        f"waiting {sum(load.queue for load in loads):,}{healthy}",
        f"KV {_range([load.token_usage for load in loads])}",
        *([corners] if corners else []),
    ]


def _range(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    return f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low * 100:.0f}-{high:.0%}"
