"""Finds answers that repeat themselves without end, by their text so far, in linear time. Pure.

A model that falls into a loop writes the same characters again and again until its limit. A text repeats
itself if its end has a period: each character equals the one a period before it. Tables, logs and poems
repeat too, so the end must be long, in characters and in periods. docs/benchmarks.md has the rate of false
alarms.
"""

from collections.abc import Sequence
from typing import NamedTuple

LEAST_CHARACTERS = 2048
"""Minimum length, in characters, of an end that counts as repeating itself: about 500 tokens of English."""
LEAST_PERIODS = 6
"""Minimum number of periods in such an end, the first one included."""
LONGEST_PERIOD = 2048
"""Maximum length, in characters, of a period that is searched for."""
TAIL = LEAST_CHARACTERS - LEAST_CHARACTERS // LEAST_PERIODS
"""Number of characters at the end of a text that must occur once more, one period earlier. If the end has n
periods, all but the first of them do."""
WINDOW = LONGEST_PERIOD * LEAST_PERIODS
"""Number of characters at the end of a text that are examined."""
LEAST_IN_PROMPT = 64
"""Minimum length of a repetition in a prompt, in characters or token ids. Shorter repetitions are lines and
indents."""


class Repetition(NamedTuple):
    """The end of a text that repeats itself."""

    start: int
    """Index at which the first period begins."""
    period: int
    """Number of characters in a period."""

    @property
    def sense(self) -> int:
        """Number of characters up to the end of the first period. The rest of the text only repeats it."""
        return self.start + self.period


def find_repetition(text: str) -> Repetition | None:
    """Return the repetition at the end of a text; None if there is none, or it is still too short."""
    window = text[-WINDOW:]
    period = _period(window, TAIL)
    if period is None or period > LONGEST_PERIOD:
        return None
    length = max(LEAST_CHARACTERS, LEAST_PERIODS * period)
    if len(window) < length or window[-length + period :] != window[-length:-period]:
        return None
    start = len(text) - length
    while start and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Repetition(start, period)


def _period(text: str, tail: int) -> int | None:
    """Return how far before its end the last `tail` characters of a text occur once more; None if nowhere.

    It searches forwards in the reversed text, because CPython's `find` takes linear time (two-way search),
    while its `rfind` compares anew at each place.
    """
    reversed_text = text[::-1]
    place = reversed_text.find(reversed_text[:tail], 1)
    return None if place < 0 else place


def repeats_in_prompt(prompt: str | Sequence[int], output: str | Sequence[int]) -> bool:
    """Tell whether the repetition at the end of an output is also in the prompt, which may have asked for it.

    Both are texts, or both are token ids.
    """
    prompt_text, output_text = _as_text(prompt), _as_text(output)
    period = _period(output_text, min(len(output_text) // 2, LEAST_IN_PROMPT))
    if not period:
        return False
    periods = max(2, -(-LEAST_IN_PROMPT // period))
    return output_text[-period:] * periods in prompt_text


def _as_text(sequence: str | Sequence[int]) -> str:
    """Return token ids as characters, in which substrings are found fast."""
    return sequence if isinstance(sequence, str) else "".join(map(chr, sequence))
