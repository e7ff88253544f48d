"""Decides from a sample of prompts whether sorting rows by common prefixes is worth it. Pure.

An engine's prefix cache reuses what it computed for a prompt when another prompt begins with the same tokens.
`order: auto` compares input order with sorted order by two fractions: the prompt bytes that the cache would
hold, and the rows that equal an earlier row.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pyroaring import BitMap64

from batchrunner.input.prompt_bytes import common_length

WINDOW_ROWS = 1024
"""Number of rows in a stretch. The dispatcher reorders at least as many rows at a time. So it finds the
common prefixes within a stretch, whatever the order of its rows."""
STRETCHES = 8
"""Number of stretches in the sample. Fewer stretches would hardly show that ten million rows consist of
groups of eight with a common prefix."""
ALIKE_BYTES = 256
"""Two prompts count as alike if their common prefix is at least this many bytes (64 tokens) longer than the
prefix that nearly all prompts share."""
FEWEST_ALIKE = 8
"""Minimum number of alike rows in the sample for an extrapolation to all rows; fewer may be chance."""
WORTH_IT, LEAST_SAVED = 0.05, 0.01
"""Sorting is worth its time and disk space if it saves at least WORTH_IT of the prompt bytes that are
computed in input order, and at least LEAST_SAVED of all prompt bytes: sorting takes about as long as
computing so many. It is also worth it if at least WORTH_IT more of the rows share the answer of an equal
row."""


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
    """Mean number of bytes of a prompt, in which a token id counts as 4; None without a sample."""

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
    """Decide on the order of `rows` rows from a sample: the prompts of some stretches of consecutive rows.

    `keys` has a key for each prompt of the sample. Rows with equal keys are sent once; without `keys`, all
    rows are sent.
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

    `rows` is the number of all rows. In input order a row shares prefixes with the rows of its stretch, and
    in sorted order with all rows. If the sample is smaller than the input, the second fraction is
    extrapolated.
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

    `ordered` holds the sorted prompts with the numbers of their stretches, and `with_earlier` is `_nearest`
    of them. A prefix that nearly all prompts share does not make rows alike, because any order reuses it. It
    is taken from two of the sorted prompts between which 90 % of the sample lie.
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

    `gains` has an entry for each sampled row with an alike row in another stretch. Let p be the fraction of
    such rows among the `sampled` rows. A row then has about x = p·rows/sampled alike rows in the input, and
    one of them precedes it with probability x / (1 + x). In that case it is taken to save the mean of
    `gains`.
    """
    if len(gains) < FEWEST_ALIKE:
        return 0.0
    alike_rows = len(gains) / sampled * rows / sampled
    return sampled * alike_rows / (1 + alike_rows) * sum(gains) / len(gains)


def equal_fractions(keys: Sequence[Sequence[Hashable]], rows: int) -> tuple[float, float]:
    """Return the fractions of all rows that equal an earlier row, in input order and sorted.

    Rows are equal if their keys are equal. If the sample is smaller than the input, the second fraction is
    extrapolated. All rows whose key occurs three times or more in the sample are taken to equal an earlier
    row. Of the other sampled rows, a fraction p has a key that occurs twice. So such a row has about x =
    p·rows/sampled equal rows in the input, and the estimate continues as in `_extrapolated_gain`.
    """
    counts = Counter(chain.from_iterable(keys))
    sampled = counts.total()
    if not sampled:
        return 0.0, 0.0
    repeats = sampled - sum(len(set(stretch)) for stretch in keys)
    in_input_order = repeats / sampled
    if sampled == rows:
        return in_input_order, 1 - len(counts) / sampled
    often = sum(count for count in counts.values() if count > 2)  # noqa: PLR2004
    twice = sum(count for count in counts.values() if count == 2)  # noqa: PLR2004
    others = sampled - often
    equal_rows = twice / others * rows / sampled if twice >= FEWEST_ALIKE else 0.0
    equal_others = others * equal_rows / (1 + equal_rows)
    return in_input_order, max(repeats, often + equal_others) / sampled


def _nearest(ordered: Iterable[tuple[bytes, int]]) -> Iterator[tuple[int, int]]:
    """Yield the length of the longest prefix that each prompt shares with an earlier one.

    There are two lengths: for earlier prompts of the same stretch, and of other stretches. `ordered` holds
    sorted prompts, each with the number of its stretch. In sorted order, the prefix that a prompt shares with
    an earlier one is the shortest prefix that neighbours between the two share.
    """
    last = [0] * STRETCHES  # length shared with the last prompt of each stretch
    before, stretch_before = b"", 0
    for prompt, stretch in ordered:
        shared = common_length(before, prompt)
        if shared < max(last):  # else the minimum changes nothing
            last = [min(shared, other) for other in last]
        last[stretch_before] = shared
        yield last[stretch], max(last[:stretch] + last[stretch + 1 :])
        before, stretch_before = prompt, stretch
