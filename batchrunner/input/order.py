"""Common prefixes of prompts, and whether sorting rows by them is worth it, from a sample of prompts.

An engine's prefix cache reuses what was computed for a prompt when another one begins with the same tokens.
Bytes stand for tokens here: texts with a common prefix have about the same one in tokens, except for a token
or two at its end. For `order: auto` are compared the fraction of prompt bytes that the cache would hold, and
the fraction of rows that equal an earlier row, in input order and sorted.
"""

import struct
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from pyroaring import BitMap64
from xxhash import xxh3_128_digest

from batchrunner.core.media import PromptFile, file_of_part
from batchrunner.core.types import Outcome, Request, RequestBody
from batchrunner.input.job_input import JobInput
from batchrunner.input.request_bodies import prompt_of

WINDOW_ROWS = 1024
"""Rows of one stretch. The dispatcher reorders at least so many rows at a time, so it finds common prefixes
within a stretch in any order."""
STRETCHES = 8
"""Stretches of the sample. With fewer, groups of eight rows in ten million would hardly be seen."""
SAMPLE_S = 60.0
"""Seconds after which the sample ends: templates may take long to render."""
STRETCH_BYTES = 16 << 20
"""Bytes of prompts after which a stretch ends."""
ALIKE_BYTES = 256
"""Two prompts count as alike if their common prefix is longer by this many bytes (64 tokens) than the one
that nearly all prompts share."""
FEWEST_ALIKE = 8
"""Fewest alike rows in the sample from which to extrapolate; fewer may be chance."""
WORTH_IT, LEAST_SAVED = 0.05, 0.01
"""Fraction of the prompt bytes that are computed in input order, or of the rows, that sorting must save to be
worth its time and disk; and the least fraction of all prompt bytes, which take about as long to sort."""


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
    """The same for sorted rows; exact where the sample is the whole input, else extrapolated."""
    input_equal: float = 0.0
    """Fraction of rows that get the answer of an equal row in input order."""
    sorted_equal: float = 0.0
    """The same for sorted rows."""
    prompt_bytes: float | None = None
    """Bytes of a prompt on average, 4 for a token id; None without a sample."""

    def __str__(self) -> str:
        return f"order: {self.order} ({self.why})"

    def own_bytes(self, *, caches_prefixes: bool) -> float | None:
        """Return the bytes of a prompt that the engine computes, on average; None without a sample."""
        shared = self.sorted_share if self.order == "prefix" else self.input_share
        if self.prompt_bytes is None or shared is None:
            return None
        return self.prompt_bytes * (1 - shared) if caches_prefixes else self.prompt_bytes


def decide_order(
    job_input: JobInput, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
) -> OrderDecision:
    """Return the order for these rows: the job's `order`, or with `auto` by a sample. Raises InputError.

    `check_stop` is called before each row of the sample, and may raise.
    """
    asked = job_input.job.order
    if asked != "auto":
        return OrderDecision(asked, "set by the job")
    ends_at = time.monotonic() + SAMPLE_S
    prompts, keys = [], []
    for stretch in stretches(rows, job_input.dataset.row_group_ends()):
        found = list(_sampled(job_input, stretch, ends_at, check_stop))
        prompts.append([prompt for prompt, _ in found])
        keys.append([key for _, key in found])
    return decide(prompts, len(rows), keys if job_input.dedupes else None)


def decide(
    sample: Sequence[Sequence[bytes]], rows: int, keys: Sequence[Sequence[Hashable]] | None = None
) -> OrderDecision:
    """Decide from the prompts of stretches of consecutive rows; `rows` is the number of all rows. Pure.

    Rows of a stretch with equal `keys` are sent once; without keys all rows are sent.
    """
    sampled = sum(map(len, sample))
    unsorted, best = shared_fractions(sample, rows)
    equal, most_equal = equal_fractions(keys, rows) if keys else (0.0, 0.0)
    order = "prefix"
    if best - unsorted >= max(LEAST_SAVED, WORTH_IT * (1 - unsorted)):
        why = (
            f"sorted, {best:.0%} of the prompt tokens can come from the cache; in input order {unsorted:.0%}"
        )
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
    """Yield the rows of the sample: all rows where they are few, else stretches spread over the input.

    A stretch begins at the start of a row group, since a row group is read from its start. `group_ends` are
    the ordinals after each row group.
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


def shared_fractions(sample: Sequence[Sequence[bytes]], rows: int) -> tuple[float, float]:
    """Return the fractions of all prompt bytes that the prefix cache holds, in input order and sorted.

    In input order a row shares prefixes with the rows of its stretch, sorted with all rows. If the sample is
    not the whole input, the second fraction is extrapolated. Let n be the sampled rows, N all rows, and p the
    fraction of sampled rows with an alike row (ALIKE_BYTES) in another stretch. Then a row has about
    x = p·N/n alike rows in the input, and one of them comes before it with a probability of x / (1 + x). It
    then saves as many bytes as the sampled rows with an alike row save on average.
    """
    whole = sum(len(prompt) for stretch in sample for prompt in stretch)
    if not whole:
        return 0.0, 0.0
    ordered = sorted((prompt, number) for number, stretch in enumerate(sample) for prompt in stretch)
    n = len(ordered)
    forward = list(_nearest(ordered))
    in_stretch = sum(near for near, _ in forward)
    if n == rows:
        best = sum(max(near) for near in forward)
        return in_stretch / whole, best / whole
    backward = reversed(list(_nearest(ordered[::-1])))
    edge = n // 20
    by_nearly_all = common_length(ordered[edge][0], ordered[-1 - edge][0])
    gains = [
        max(0, max(behind, before) - near)
        for (near, behind), (_, before) in zip(forward, backward, strict=True)
        if max(behind, before) >= by_nearly_all + ALIKE_BYTES
    ]
    if len(gains) < FEWEST_ALIKE:
        return in_stretch / whole, in_stretch / whole
    alike = len(gains) / n * rows / n
    gained = n * alike / (1 + alike) * sum(gains) / len(gains)
    return in_stretch / whole, min(1.0, (in_stretch + gained) / whole)


def equal_fractions(keys: Sequence[Sequence[Hashable]], rows: int) -> tuple[float, float]:
    """Return the fractions of all rows that equal an earlier row, in input order and sorted.

    Rows are equal if their keys are. If the sample is not the whole input, the second fraction is
    extrapolated: all rows of a key that occurs three times or more in the sample have an equal row. Of the
    other rows a fraction p occurs twice, so that a row has about x = p·N/n equal rows, as in
    `shared_fractions`.
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
    """Yield the length of the longest prefix that each prompt shares with the earlier ones.

    Two lengths: with prompts of its own stretch, and of other stretches. `ordered` is sorted.
    """
    last = [0] * STRETCHES  # with the last prompt of each stretch
    before, stretch_before = b"", 0
    for prompt, stretch in ordered:
        shared = common_length(before, prompt)
        if shared < max(last):  # else no minimum is another
            last = [min(shared, other) for other in last]
        last[stretch_before] = shared
        yield last[stretch], max(last[:stretch] + last[stretch + 1 :])
        before, stretch_before = prompt, stretch


def _sampled(
    job_input: JobInput, rows: BitMap64, ends_at: float, check_stop: Callable[[], None]
) -> Iterator[tuple[bytes, Hashable]]:
    """Yield the prompt of each row, and what is the same for rows that share an answer.

    The prompt is empty where the row cannot be rendered.
    """
    size, digests = 0, RequestDigests()
    for batch in job_input.batches(rows, check_stop):
        for item in batch:
            if isinstance(item, Outcome):
                yield b"", item.ref.row
                continue
            prompt = prompt_bytes(item)
            size += len(prompt)
            yield prompt, digests.of(item, prompt) if is_repeatable(item) else item.ref.row
        if size >= STRETCH_BYTES or time.monotonic() > ends_at:
            return


def is_repeatable(request: Request) -> bool:
    """Tell whether equal rows are sure to get the same answer: without sampling, or without decoding."""
    return request.task is not None or request.sampling.get("temperature") == 0


BLOCK_BYTES, BLOCK_SHARE = 64, 16
"""Size of the blocks of a prompt whose checksums are its sort key: a block has BLOCK_BYTES, or 1/BLOCK_SHARE
of the bytes before it where that is more. So a common prefix of 10 kB may count as 9.5 kB, and the key of a
prompt of 1 MB has 520 bytes."""


BYTES_A_TOKEN = 4
"""Bytes that stand for each token of an image."""


def _blocks(longest: int) -> list[tuple[int, int]]:
    blocks = [(0, BLOCK_BYTES)]
    while (start := blocks[-1][1]) < longest:
        blocks.append((start, start + max(BLOCK_BYTES, start // BLOCK_SHARE)))
    return blocks


_BLOCKS = _blocks(1 << 30)
_ENDS = [end for _, end in _BLOCKS[:-1]]


def sort_key(prompt: bytes) -> tuple[bytes, int]:
    """Return a short sort key for a prompt, and a checksum of its rest, which is no whole block.

    The key is a 4-byte checksum of each whole block. Sorted by it, prompts with a common prefix are
    neighbours, whatever its length, and a prompt comes right before those that continue it.
    """
    whole = bisect_right(_ENDS, len(prompt))
    sums = array("I", [crc32(prompt[start:end]) for start, end in _BLOCKS[:whole]])
    return sums.tobytes(), crc32(prompt[_BLOCKS[whole][0] :])


def prompt_bytes(request: Request) -> bytes:
    """Return the whole prompt as bytes, after the name of the LoRA adapter, since adapters share no cache."""
    adapter = f"{request.lora_path}\0".encode() if request.lora_path else b""
    if request.kind == "input_ids":
        return adapter + _ids(request.prompt)
    if isinstance(request.prompt, RequestBody):
        return prompt_of(request.prompt)
    if request.kind == "text":
        return adapter + b"".join(map(_file, request.media)) + _bytes(request.prompt)
    if request.tools is not None and request.tools.by_row:  # chat templates write them at the beginning
        adapter += _bytes(repr(request.tools.tools))
    if request.media:
        return adapter + b"".join(_message_with(message, request.media) for message in request.prompt)
    return adapter + b"".join(map(_message, request.prompt))


class RequestDigests:
    """Makes the digests of requests, by which equal ones are known, by another run too.

    They are of all that a request asks for; the model, and the checks of its answer, are the run's.
    """

    def __init__(self) -> None:
        self._same: tuple[Any, ...] = ()
        self._settings = b""

    def write(self, request: Request, prompt: bytes) -> None:
        """Write the digest of a request, whose `prompt_bytes` these are, where its reference takes one."""
        digests = request.ref.digests
        if digests is not None:
            digests[request.ref.position] = self.of(request, prompt)

    def of(self, request: Request, prompt: bytes) -> bytes:
        """Return the digest of a request, whose `prompt_bytes` these are."""
        if request[3:] != self._same:  # nearly always all rows have the same settings
            self._same = request[3:]
            self._settings = xxh3_128_digest(_settings(request))
        if isinstance(request.prompt, RequestBody):
            prompt = request.prompt.content
        return xxh3_128_digest(self._settings + prompt)


def _settings(request: Request) -> bytes:
    """Return what a request has besides its prompt, written in one way in any process."""
    asks = request.asks
    return _bytes(
        repr((
            sorted(request.sampling.items()), request.lora_path, request.chat_template_kwargs,
            request.continues, asks and (sorted(asks.names), asks.top_logprobs), request.row, request.task,
            request.tools, [file.rules._replace(folder="") for file in request.media], request.items,
        ))
    )  # fmt: skip


def common_length(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two prompts, in bytes."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, step = 0, 64  # invariant: the first `low` bytes are equal
    while one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, most)  # and they differ before `high`
    differ = int.from_bytes(one[low:high]) ^ int.from_bytes(other[low:high])
    return high - (differ.bit_length() + 7) // 8


def _ids(ids: Sequence[int]) -> bytes:
    try:  # in this machine's order of bytes: in another one it takes three times as long
        return struct.pack(f"{len(ids)}i", *ids)
    except struct.error:  # an id over 32 bits: the engine refuses the row
        return repr(ids).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _message(message: Any) -> bytes:
    if isinstance(message, dict) and message.keys() == {"role", "content"}:
        return _bytes(f"{message['role']}\0{message['content']}\0")
    return _bytes(repr(message))


def _file(file: PromptFile) -> bytes:
    """Return bytes that stand for the tokens of a file: equal files have equal ones."""
    length = BYTES_A_TOKEN * file.tokens
    return (file.key * (length // len(file.key) + 1))[:length]


def _message_with(message: dict[str, Any], files: Sequence[PromptFile]) -> bytes:
    """Return the bytes of a message whose content may have files."""
    content = message.get("content")
    if not isinstance(content, list):
        return _message(message)
    pieces = [_bytes(f"{message['role']}\0")]
    for part in content:
        own = file_of_part(part)
        pieces.append(_bytes(repr(part)) if own is None else _file(files[own]))
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return b"".join([*pieces, _bytes(repr(others)) if others else b"", b"\0"])
