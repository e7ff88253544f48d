"""What sorting would gain: how much need not be computed, or sent, in input order, and sorted. A sample.

With `order: auto` it decides. Bytes stand for tokens (`prefixes`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchrunner.core.types import Request
from batchrunner.input.prefixes import common, prefix_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyroaring import BitMap64

    from batchrunner.input.job_input import JobInput

WINDOW_ROWS = 1024
"""Rows that are sure to be looked at together when they are sent (`arrange` takes more at a time): what they
have in common is found in any order."""
STRETCHES = 8
"""Spread over the input: of ten million rows fewer hardly show groups of eight."""
STRETCH_BYTES = 16 << 20
"""Of prompts, that a stretch of the sample has at most (and one prompt more)."""
ALIKE_BYTES = 256
"""Two prompts count as alike that have so much in common beyond what nearly all have: 64 tokens."""
FEWEST_ALIKE = 8
"""With fewer rows in the sample that are like another it may be chance."""
WORTH_IT = 0.05
"""Of the prompts' bytes: what sorting has to save in addition to be worth its time and disk."""


@dataclass(frozen=True, slots=True)
class OrderDecision:
    """An order, and why."""

    order: str
    """input, prefix or longest_first."""
    why: str
    rows_sampled: int = 0
    input_share: float | None = None
    """Of the prompts' bytes: what an engine with room for them has computed before, in input order …"""
    sorted_share: float | None = None
    """… and sorted; exact where the sample is everything. None where nobody looked."""
    input_equal: float = 0.0
    """Of the rows: those that get the answer of an equal one, in input order …"""
    sorted_equal: float = 0.0
    """… and sorted."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as an event's values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"order: {self.order} ({self.why})"


def choose(job_input: JobInput, rows: BitMap64) -> OrderDecision:
    """Decide on the order of these rows; reads and renders 8 stretches of 1,024 at most."""
    sample = [
        _prefixes(job_input, stretch) for stretch in stretches(rows, job_input.dataset.row_group_ends())
    ]
    job = job_input.job
    return decide(sample, len(rows), dedupe=job.dedupe and job.sampling.temperature == 0)


def decide(sample: Sequence[Sequence[bytes]], rows: int, *, dedupe: bool = False) -> OrderDecision:
    """Decide by the prompts of some stretches of consecutive rows, of so many rows in all. Pure.

    With `dedupe` those of equal prompts are sent once where they are looked at together.
    """
    sampled = sum(map(len, sample))
    as_it_is, best = shares(sample, rows)
    equal, most_equal = equals(sample, rows) if dedupe else (0.0, 0.0)
    order = "prefix"
    if best - as_it_is >= WORTH_IT:
        why = f"input order would find {as_it_is:.0%} of the prompt tokens computed before, sorted {best:.0%}"
    elif most_equal - equal >= WORTH_IT:
        why = f"input order would find {equal:.0%} of the rows equal to one before, sorted {most_equal:.0%}"
    else:
        order = "input"
        why = f"sorting gains nothing: {as_it_is:.0%} of the prompt tokens are found computed as they stand"
    return OrderDecision(
        order, why, sampled, round(as_it_is, 4), round(best, 4), round(equal, 4), round(most_equal, 4)
    )


def stretches(rows: BitMap64, group_ends: Sequence[int]) -> Iterator[BitMap64]:
    """Yield the rows to look at: all where they are few, else stretches spread over the input.

    They begin where row groups do: what lies before them in one would have to be read too.
    """
    few = len(rows) <= STRETCHES * WINDOW_ROWS
    start = 0
    for number in range(STRETCHES):
        if not few:
            middle = rows[len(rows) * number // STRETCHES]
            group = bisect_right(group_ends, middle)
            begin = group_ends[group - 1] if group else 0
            start = max(start, rows.rank(begin - 1) if begin else 0)
        if start < len(rows):
            yield rows[start : start + WINDOW_ROWS]
        start += WINDOW_ROWS


def shares(sample: Sequence[Sequence[bytes]], rows: int) -> tuple[float, float]:
    """Return which shares of all prompts' bytes need no computing in input order, and sorted.

    In input order a row finds what it has in common with the rows of its stretch. Sorted it also finds what
    it has in common with all others. Where the sample is not everything few of a row's mates are in it: a
    share p of its n rows has one in another stretch (`ALIKE_BYTES`), so a row has about x = p·N/n of them in
    all N rows, and finds one before it with a chance of x / (1 + x). Then it saves what those with a mate in
    the sample would have saved, on average.
    """
    whole = sum(len(prefix) for stretch in sample for prefix in stretch)
    if not whole:
        return 0.0, 0.0
    ordered = sorted((prefix, number) for number, stretch in enumerate(sample) for prefix in stretch)
    n = len(ordered)
    forward = list(_nearest(ordered))
    in_stretch = sum(near for near, _ in forward)
    if n == rows:
        best = sum(max(near) for near in forward)
        return in_stretch / whole, best / whole
    backward = reversed(list(_nearest(ordered[::-1])))
    edge = n // 20
    by_nearly_all = common(ordered[edge][0], ordered[-1 - edge][0])
    gains = [
        max(0, max(behind, before) - near)
        for (near, behind), (_, before) in zip(forward, backward, strict=True)
        if max(behind, before) >= by_nearly_all + ALIKE_BYTES
    ]
    if len(gains) < FEWEST_ALIKE:
        return in_stretch / whole, in_stretch / whole
    mates = len(gains) / n * rows / n
    gained = n * mates / (1 + mates) * sum(gains) / len(gains)
    return in_stretch / whole, min(1.0, (in_stretch + gained) / whole)


def equals(sample: Sequence[Sequence[bytes]], rows: int) -> tuple[float, float]:
    """Return which shares of all rows are equal to one before: of their stretch, and of all.

    Where the sample is not everything: a prompt that is in it three times or more has so many equals that all
    its rows find one. Of the others a share p is there twice, so that a row has about x = p·N/n equals, as in
    `shares`.
    """
    counts = Counter(prefix for stretch in sample for prefix in stretch)
    n = counts.total()
    if not n:
        return 0.0, 0.0
    repeats = n - sum(len(set(stretch)) for stretch in sample)
    if n == rows:
        return repeats / n, 1 - len(counts) / n
    often = sum(count for count in counts.values() if count > 2)  # noqa: PLR2004
    twice = sum(count for count in counts.values() if count == 2)  # noqa: PLR2004
    mates = twice / (n - often) * rows / n if twice >= FEWEST_ALIKE else 0.0
    return repeats / n, max(repeats, often + (n - often) * mates / (1 + mates)) / n


def _nearest(ordered: Iterable[tuple[bytes, int]]) -> Iterator[tuple[int, int]]:
    """Yield how many bytes each prompt has in common with the ones before it: of its stretch, of others."""
    last = [0] * STRETCHES  # with the last one of each stretch
    before, stretch_before = b"", 0
    for prefix, stretch in ordered:
        alike = common(before, prefix)
        last = [min(alike, other) for other in last]
        last[stretch_before] = alike
        yield last[stretch], max(last[:stretch] + last[stretch + 1 :])
        before, stretch_before = prefix, stretch


def _prefixes(job_input: JobInput, rows: BitMap64) -> list[bytes]:
    found: list[bytes] = []
    size = 0
    for batch in job_input.batches(rows):
        for item in batch:
            found.append(prefix_of(item) if isinstance(item, Request) else b"")
            size += len(found[-1])
        if size >= STRETCH_BYTES:
            break
    return found
