"""Whether sorting rows by common prefixes is worth it. Pure: decides from a sample of prompts.

An engine's prefix cache reuses what it computed for a prompt when another prompt begins with the same tokens.
`order: auto` compares input order with sorted order by two fractions: the prompt bytes that the cache would
hold, and the rows that equal an earlier row.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pyroaring import BitMap64

from batchrunner.input.prompt_bytes import common_length

WINDOW_ROWS = 1024
"""Rows of one stretch. The dispatcher reorders at least as many rows at a time, so it finds common prefixes
within a stretch in any order."""
STRETCHES = 8
"""Stretches of the sample. Fewer would hardly show groups of eight rows in ten million."""
ALIKE_BYTES = 256
"""Two prompts are alike if their common prefix exceeds the prefix of nearly all prompts by so many bytes (64
tokens)."""
FEWEST_ALIKE = 8
"""Fewest alike rows of the sample that are extrapolated to all rows; fewer may be chance."""
WORTH_IT, LEAST_SAVED = 0.05, 0.01
"""What sorting must save to be worth its time and disk: a fraction of the prompt bytes that input order
computes, or of the rows; and at least a fraction of all prompt bytes, which take about as long to sort."""


@dataclass(frozen=True, slots=True)
class OrderDecision:
    """The order in which rows are sent, and the reason. The fields are keys of the event `order`."""

    order: str
    """"input", "prefix" or "longest_first"."""
    why: str
    """The reason, in words."""
    rows_sampled: int = 0
    """Rows that were read for the decision."""
    input_share: float | None = None
    """Fraction of prompt bytes that the prefix cache would hold in input order; None without a sample."""
    sorted_share: float | None = None
    """The same fraction in sorted order: exact where the sample is the whole input, else extrapolated."""
    input_equal: float = 0.0
    """Fraction of rows that share the answer of an equal row, in input order."""
    sorted_equal: float = 0.0
    """The same fraction in sorted order."""
    prompt_bytes: float | None = None
    """Bytes of a prompt on average, 4 for a token id; None without a sample."""

    def __str__(self) -> str:
        return f"order: {self.order} ({self.why})"

    def computed_bytes(self, *, caches_prefixes: bool) -> float | None:
        """Return the mean bytes of a prompt that the engine computes; None without a sample."""
        shared = self.sorted_share if self.order == "prefix" else self.input_share
        if self.prompt_bytes is None or shared is None:
            return None
        return self.prompt_bytes * (1 - shared) if caches_prefixes else self.prompt_bytes


def decide(
    sample: Sequence[Sequence[bytes]], rows: int, keys: Sequence[Sequence[Hashable]] | None = None
) -> OrderDecision:
    """Decide from the prompts of stretches of consecutive rows; `rows` is the number of all rows.

    Rows with equal `keys` are sent once; without keys all rows are sent.
    """
    sampled = sum(map(len, sample))
    unsorted, best = shared_fractions(sample, rows)
    equal, most_equal = equal_fractions(keys, rows) if keys else (0.0, 0.0)
    order = "prefix"
    if best - unsorted >= max(LEAST_SAVED, WORTH_IT * (1 - unsorted)):
        from_cache = f"{best:.0%} of the prompt tokens can come from the cache"
        why = f"sorted, {from_cache}; in input order {unsorted:.0%}"
    elif most_equal - equal >= WORTH_IT:
        repeated = f"{most_equal:.0%} of the rows equal an earlier one and share its answer"
        why = f"sorted, {repeated}; in input order {equal:.0%}"
    else:
        order = "input"
        why = f"{unsorted:.0%} of the prompt tokens can come from the cache; sorting would not raise that"
    size = sum(len(prompt) for stretch in sample for prompt in stretch)
    return OrderDecision(
        order,
        why,
        sampled,
        input_share=round(unsorted, 4),
        sorted_share=round(best, 4),
        input_equal=round(equal, 4),
        sorted_equal=round(most_equal, 4),
        prompt_bytes=round(size / sampled, 1) if sampled else None,
    )


def stretches(rows: BitMap64, group_ends: Sequence[int]) -> Iterator[BitMap64]:
    """Yield the rows of the sample: all rows if they are few, else stretches spread over the input.

    A stretch begins with a row group, because a row group is read from its start. `group_ends` are the
    ordinals after the last row of each row group.
    """
    takes_all = len(rows) <= STRETCHES * WINDOW_ROWS
    start = 0
    for number in range(STRETCHES):
        if not takes_all:
            middle = rows[len(rows) * number // STRETCHES]
            group = bisect_right(group_ends, middle)
            begin = group_ends[group - 1] if group else 0
            start = max(start, rows.rank(begin - 1) if begin else 0)
        if start < len(rows):
            yield rows[start : start + WINDOW_ROWS]
        start += WINDOW_ROWS


def shared_fractions(sample: Sequence[Sequence[bytes]], rows: int) -> tuple[float, float]:
    """Return the fractions of all prompt bytes that the prefix cache holds, in input order and sorted.

    `rows` is the number of all rows. In input order a row shares prefixes with the rows of its stretch, in
    sorted order with all rows. If the sample is smaller than the input, the second fraction is extrapolated.
    """
    total_bytes = sum(len(prompt) for stretch in sample for prompt in stretch)
    if not total_bytes:
        return 0.0, 0.0
    ordered = sorted((prompt, number) for number, stretch in enumerate(sample) for prompt in stretch)
    with_earlier = list(_nearest(ordered))
    bytes_in_stretches = sum(in_stretch for in_stretch, _ in with_earlier)
    if len(ordered) == rows:
        sorted_bytes = float(sum(map(max, with_earlier)))
    else:
        gains = _gains_of_sorting(ordered, with_earlier)
        sorted_bytes = bytes_in_stretches + _extrapolated_gain(gains, len(ordered), rows)
    return bytes_in_stretches / total_bytes, min(1.0, sorted_bytes / total_bytes)


def _gains_of_sorting(
    ordered: Sequence[tuple[bytes, int]], with_earlier: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the bytes that sorting saves for each sampled row with an alike row in another stretch.

    `ordered` holds the sorted prompts with the numbers of their stretches, `with_earlier` their `_nearest`. A
    prefix that nearly all prompts share makes no row alike: any order reuses it.
    """
    with_later = reversed(list(_nearest(ordered[::-1])))
    edge = len(ordered) // 20
    prefix_of_nearly_all = common_length(ordered[edge][0], ordered[-1 - edge][0])
    gains = []
    for (in_stretch, earlier), (_, later) in zip(with_earlier, with_later, strict=True):
        in_other_stretches = max(earlier, later)
        if in_other_stretches >= prefix_of_nearly_all + ALIKE_BYTES:
            gains.append(max(0, in_other_stretches - in_stretch))
    return gains


def _extrapolated_gain(gains: Sequence[int], sampled: int, rows: int) -> float:
    """Return the bytes that sorting all rows would save for the sampled rows.

    `gains` belong to the sampled rows with an alike row in another stretch, a fraction p of the `sampled`
    rows. A row then has about x = p·rows/sampled alike rows in the input, and one of them precedes it with
    probability x / (1 + x). It saves as many bytes as the rows of `gains` do on average.
    """
    if len(gains) < FEWEST_ALIKE:
        return 0.0
    alike_rows = len(gains) / sampled * rows / sampled
    return sampled * alike_rows / (1 + alike_rows) * sum(gains) / len(gains)


def equal_fractions(keys: Sequence[Sequence[Hashable]], rows: int) -> tuple[float, float]:
    """Return the fractions of all rows that equal an earlier row, in input order and sorted.

    Rows are equal if their keys are. Unless the sample is the whole input, the second fraction is
    extrapolated: every row has an equal row if its key occurs three times or more in the sample. A fraction p
    of the other sampled rows occurs twice, so a row has about x = p·rows/sampled equal rows in the input; see
    `_extrapolated_gain`.
    """
    counts = Counter(key for stretch in keys for key in stretch)
    n = counts.total()
    if not n:
        return 0.0, 0.0
    repeats = n - sum(len(set(stretch)) for stretch in keys)
    if n == rows:
        return repeats / n, 1 - len(counts) / n
    often = sum(count for count in counts.values() if count > 2)  # noqa: PLR2004
    twice = sum(count for count in counts.values() if count == 2)  # noqa: PLR2004
    alike = twice / (n - often) * rows / n if twice >= FEWEST_ALIKE else 0.0
    return repeats / n, max(repeats, often + (n - often) * alike / (1 + alike)) / n


def _nearest(ordered: Iterable[tuple[bytes, int]]) -> Iterator[tuple[int, int]]:
    """Yield the longest prefixes that each prompt shares with earlier ones: of its stretch, and of others.

    `ordered` holds sorted prompts with the numbers of their stretches.
    """
    last = [0] * STRETCHES  # prefix shared with the last prompt of each stretch
    before, stretch_before = b"", 0
    for prompt, stretch in ordered:
        shared = common_length(before, prompt)
        if shared < max(last):  # else the minimum changes nothing
            last = [min(shared, other) for other in last]
        last[stretch_before] = shared
        yield last[stretch], max(last[:stretch] + last[stretch + 1 :])
        before, stretch_before = prompt, stretch
