"""Decides from a sample of prompts whether sorting rows by common prefixes is worth the time. Does no I/O.

An engine's prefix cache reuses the computation of a prompt for later prompts that begin with the same tokens.
`order: auto` compares input order with sorted order by two fractions: the prompt bytes that come from the
prefix cache, and the rows that equal an earlier row and share its answer.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pyroaring import BitMap64

from batchrunner.input.prompt_bytes import common_length

WINDOW_ROWS = 1024
"""Maximum number of rows in a stretch (consecutive rows in the sample).

The dispatcher reorders at least this many rows at a time, so it finds common prefixes within a stretch even
in input order.
"""
STRETCHES = 8
"""Number of stretches (consecutive rows) in the sample.

With fewer stretches, the sample might miss, for example, that ten million rows consist of groups of eight
with a common prefix.
"""
ALIKE_BYTES = 256
"""Additional bytes that two prompts must share, beyond the prefix of nearly all prompts, to be alike.

256 bytes are about 64 tokens.
"""
FEWEST_ALIKE = 8
"""Minimum number of rows in the sample that share a long prefix with another row.

With fewer, the sample says nothing about all rows: it may be chance.
"""
WORTH_IT = 0.05
"""Minimum fraction by which sorting must help to be worth its time and disk space.

It must save this fraction of the prompt bytes that are computed in input order, or raise the fraction of rows
that share an equal row's answer by this much.
"""
LEAST_SAVED = 0.01
"""Minimum fraction of all prompt bytes that sorting must save.

The engine computes this fraction in about the time that sorting takes.
"""


@dataclass(frozen=True, slots=True)
class OrderDecision:
    """Decision on the order in which rows are sent. The fields are written as the event `order`."""

    order: str
    """Sending order: "input", "prefix" or "longest_first"."""
    why: str
    """Reason for the order, in words."""
    rows_sampled: int = 0
    """Number of rows in the sample."""
    input_share: float | None = None
    """Fraction of prompt bytes that come from the prefix cache in input order; None without a sample."""
    sorted_share: float | None = None
    """Fraction of prompt bytes that come from the prefix cache in sorted order; None without a sample.

    It is exact if the sample is the whole input, else extrapolated.
    """
    input_equal: float = 0.0
    """Fraction of rows that share the answer of an equal earlier row, in input order."""
    sorted_equal: float = 0.0
    """Fraction of rows that share the answer of an equal earlier row, in sorted order."""
    prompt_bytes: float | None = None
    """Mean prompt length in bytes; a token id counts as 4 bytes. None without a sample."""

    def __str__(self) -> str:
        return f"order: {self.order} ({self.why})"

    def computed_bytes(self, *, caches_prefixes: bool) -> float | None:
        """Return the mean number of prompt bytes that the engine computes per row; None without a sample.

        `caches_prefixes` tells whether the engine has a prefix cache.
        """
        cached_share = self.sorted_share if self.order == "prefix" else self.input_share
        if self.prompt_bytes is None or cached_share is None:
            return None
        return self.prompt_bytes * (1 - cached_share) if caches_prefixes else self.prompt_bytes


def decide(
    sample: Sequence[Sequence[bytes]], rows: int, keys: Sequence[Sequence[Hashable]] | None = None
) -> OrderDecision:
    """Decide on the order of an input of `rows` rows.

    `sample` has the prompts of several stretches of consecutive rows. `keys` has a key for each of these
    prompts: rows with equal keys are sent once. Without `keys`, all rows are sent.
    """
    sampled = sum(map(len, sample))
    input_share, sorted_share = shared_fractions(sample, rows)
    input_equal, sorted_equal = equal_fractions(keys, rows) if keys else (0.0, 0.0)
    # Sorting must save enough prompt tokens, or let enough rows share an answer. Without sorting, the engine
    # computes this fraction of the prompt tokens:
    computed_share = 1 - input_share
    order = "prefix"
    if sorted_share - input_share >= max(LEAST_SAVED, WORTH_IT * computed_share):
        why = (
            f"sorted, {sorted_share:.0%} of the prompt tokens can come from the cache; "
            f"in input order {input_share:.0%}"
        )
    elif sorted_equal - input_equal >= WORTH_IT:
        why = (
            f"sorted, {sorted_equal:.0%} of the rows equal an earlier row and share its answer; "
            f"in input order {input_equal:.0%}"
        )
    else:
        order = "input"
        why = (
            f"{input_share:.0%} of the prompt tokens can come from the cache; "
            "sorting would not raise this share enough"
        )
    size = sum(len(prompt) for stretch in sample for prompt in stretch)
    return OrderDecision(
        order,
        why,
        rows_sampled=sampled,
        input_share=round(input_share, 4),
        sorted_share=round(sorted_share, 4),
        input_equal=round(input_equal, 4),
        sorted_equal=round(sorted_equal, 4),
        prompt_bytes=round(size / sampled, 1) if sampled else None,
    )


def stretches(rows: BitMap64, group_ends: Sequence[int]) -> Iterator[BitMap64]:
    """Yield the rows of the sample: all rows if they are few, else stretches spread over the input.

    A stretch begins with a row group, because reading starts there anyway. `group_ends` are the row numbers
    at which row groups end (exclusive).
    """
    samples_all = len(rows) <= STRETCHES * WINDOW_ROWS
    # Index in `rows` of the first row that is in no stretch yet.
    start = 0
    for number in range(STRETCHES):
        if not samples_all:
            evenly_spread_row = rows[len(rows) * number // STRETCHES]
            group = bisect_right(group_ends, evenly_spread_row)
            group_begin = group_ends[group - 1] if group else 0
            rows_before_group = rows.rank(group_begin - 1) if group_begin else 0
            # Several stretches may lie in one large row group, but must not overlap.
            start = max(start, rows_before_group)
        if start < len(rows):
            yield rows[start : start + WINDOW_ROWS]
        start += WINDOW_ROWS


def shared_fractions(sample: Sequence[Sequence[bytes]], rows: int) -> tuple[float, float]:
    """Return the fractions of prompt bytes that come from the prefix cache, in input order and sorted.

    Each list in `sample` is a stretch of consecutive rows; `rows` is the number of all rows. In input order,
    a row shares prefixes only within its stretch. Sorted, it shares prefixes with all rows. If the sample is
    smaller than the input, the second fraction is extrapolated.
    """
    total_bytes = sum(len(prompt) for stretch in sample for prompt in stretch)
    if not total_bytes:
        return 0.0, 0.0
    ordered = sorted((prompt, number) for number, stretch in enumerate(sample) for prompt in stretch)
    # For each prompt, the lengths of the longest prefixes that it shares with earlier prompts: those of its
    # own stretch (consecutive rows), and all others.
    shared_with_earlier = list(_nearest(ordered))
    bytes_in_stretches = sum(in_stretch for in_stretch, _ in shared_with_earlier)
    is_whole_input = len(ordered) == rows
    if is_whole_input:
        # In sorted order, the earlier prompt may come from any part of the sample.
        sorted_bytes = float(sum(map(max, shared_with_earlier)))
    else:
        gains = _gains_of_sorting(ordered, shared_with_earlier)
        sorted_bytes = bytes_in_stretches + _extrapolated_gain(gains, len(ordered), rows)
    return bytes_in_stretches / total_bytes, min(1.0, sorted_bytes / total_bytes)


def _gains_of_sorting(
    ordered: Sequence[tuple[bytes, int]], shared_with_earlier: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the bytes that sorting saves for sampled rows whose prefix occurs in another part of the sample.

    The result has an entry for each such row. `ordered` has the sorted prompts, each with the number of its
    stretch (consecutive rows). `shared_with_earlier` is the result of `_nearest(ordered)`. A prefix that
    nearly all prompts share does not count, because the prefix cache reuses it in any order.
    """
    # Searching from the end gives the later prompts that share the longest prefix.
    shared_with_later = reversed(list(_nearest(ordered[::-1])))
    # Sorted prompts share at least the common prefix of any two prompts around them. So 90 % of the prompts
    # share the common prefix of the prompts at 5 % and 95 % of the sample.
    edge = len(ordered) // 20
    prefix_of_nearly_all = common_length(ordered[edge][0], ordered[-1 - edge][0])
    gains = []
    for (in_stretch, earlier), (_, later) in zip(shared_with_earlier, shared_with_later, strict=True):
        in_other_stretches = max(earlier, later)
        if in_other_stretches >= prefix_of_nearly_all + ALIKE_BYTES:
            gains.append(max(0, in_other_stretches - in_stretch))
    return gains


def _extrapolated_gain(gains: Sequence[int], sampled: int, rows: int) -> float:
    """Return the bytes that sorting all rows would save for the `sampled` rows.

    `gains` has the saved bytes of each sampled row that shares a long prefix with a row elsewhere in the
    sample. Let p be the fraction of such rows in the sample. A row then has about x = p·rows/sampled such
    partners in the whole input. At least one of them precedes the row with probability x / (1 + x), and then
    the row saves the mean of `gains`.
    """
    if len(gains) < FEWEST_ALIKE:
        return 0.0
    alike_rows = len(gains) / sampled * rows / sampled
    return sampled * alike_rows / (1 + alike_rows) * sum(gains) / len(gains)


def equal_fractions(keys: Sequence[Sequence[Hashable]], rows: int) -> tuple[float, float]:
    """Return the fractions of all rows that equal an earlier row, in input order and sorted.

    `keys` has a list of keys for each stretch (consecutive rows in the sample); rows are equal if their keys
    are equal. `rows` is the number of all rows. In input order, only earlier rows of the same stretch count.
    Sorted, all earlier rows count.

    If the sample is smaller than the input, the second fraction is extrapolated. Rows whose key occurs three
    times or more in the sample are assumed to equal an earlier row. Let p be the fraction of the other
    sampled rows whose key occurs twice. A row then has about x = p·rows/sampled equal rows in the input, and
    at least one of them precedes the row with probability x / (1 + x).
    """
    counts = Counter(chain.from_iterable(keys))
    sampled = counts.total()
    if not sampled:
        return 0.0, 0.0
    repeats_in_stretches = sampled - sum(len(set(stretch)) for stretch in keys)
    in_input_order = repeats_in_stretches / sampled
    is_whole_input = sampled == rows
    if is_whole_input:
        # Sorted, every row except the first of each key equals an earlier row.
        return in_input_order, 1 - len(counts) / sampled
    rows_with_frequent_key = sum(count for count in counts.values() if count > 2)  # noqa: PLR2004
    rows_with_key_twice = sum(count for count in counts.values() if count == 2)  # noqa: PLR2004
    other_rows = sampled - rows_with_frequent_key
    # `equal_rows` is x of the docstring. It stays 0 if so few rows have a partner that this may be chance.
    equal_rows = 0.0
    if rows_with_key_twice >= FEWEST_ALIKE:
        equal_rows = rows_with_key_twice / other_rows * rows / sampled
    other_repeats = other_rows * equal_rows / (1 + equal_rows)
    # Sorted order has at least the repeats of input order.
    sorted_repeats = max(repeats_in_stretches, rows_with_frequent_key + other_repeats)
    return in_input_order, sorted_repeats / sampled


def _nearest(ordered: Iterable[tuple[bytes, int]]) -> Iterator[tuple[int, int]]:
    """Yield for each prompt the lengths of the longest prefixes that it shares with earlier prompts.

    The first length is for prompts of the same stretch (consecutive rows in the sample), the second for other
    stretches. `ordered` has the sorted prompts, each with the number of its stretch. Sorted, two prompts
    share the shortest of the prefixes that the neighbours between them share.
    """
    # For each stretch, the length of the prefix that the prompt shares with the stretch's last prompt so far.
    shared_by_stretch = [0] * STRETCHES
    previous_prompt, previous_stretch = b"", 0
    for prompt, stretch in ordered:
        shared = common_length(previous_prompt, prompt)
        # The list is built anew only if a length changes.
        if shared < max(shared_by_stretch):
            shared_by_stretch = [min(shared, length) for length in shared_by_stretch]
        # In its own stretch, the previous prompt is the last one so far.
        shared_by_stretch[previous_stretch] = shared
        other_stretches = shared_by_stretch[:stretch] + shared_by_stretch[stretch + 1 :]
        yield shared_by_stretch[stretch], max(other_stretches)
        previous_prompt, previous_stretch = prompt, stretch
