"""Finds answers that repeat themselves without end, by their text so far, in linear time.

A model that falls into a loop writes the same characters again and again until `max_new_tokens`. A text
repeats itself if its end is periodic: each character equals the character one period before it. Tables, logs
and poems repeat characters too. So the periodic end counts only if it is long, in characters and in periods.
docs/benchmarks.md has the rate of false alarms.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

LEAST_CHARACTERS = 2048
"""Minimum number of characters in the periodic end of a text: about 500 tokens of English."""
LEAST_PERIODS = 6
"""Minimum number of periods in the periodic end of a text, the first period included."""
LONGEST_PERIOD = 2048
"""Maximum length of a period in characters. Longer ones are not searched for."""
REPEATED_CHARACTERS = LEAST_CHARACTERS - LEAST_CHARACTERS // LEAST_PERIODS
"""Number of characters at the end of a text that must also occur one period earlier: the shortest repetition
without its first period."""
WINDOW = LONGEST_PERIOD * LEAST_PERIODS
"""Number of characters at the end of a text that are examined."""
LEAST_IN_PROMPT = 64
"""Minimum length of a repetition in a prompt, in characters or token ids. Shorter repetitions, such as rules
and indentation, are common in prompts."""


class Repetition(NamedTuple):
    """The periodic end of a text."""

    start: int
    """Index of the character at which the first period begins."""
    period: int
    """Number of characters in a period."""

    @property
    def first_end(self) -> int:
        """Index at which the first period ends. The rest of the text only repeats this period."""
        return self.start + self.period


def find_repetition(text: str) -> Repetition | None:
    """Return the periodic end of a text; None if there is none, or if it is too short.

    The period is the distance from the last REPEATED_CHARACTERS of the text to their previous occurrence.
    """
    window = text[-WINDOW:]
    period = _distance_to_repeat(window, REPEATED_CHARACTERS)
    if period is None or period > LONGEST_PERIOD:
        return None
    # The repetition must have at least LEAST_PERIODS periods and LEAST_CHARACTERS characters. Only its last
    # REPEATED_CHARACTERS characters have been compared so far.
    length = max(LEAST_CHARACTERS, LEAST_PERIODS * period)
    if len(window) < length or window[-length + period :] != window[-length:-period]:
        return None
    start = len(text) - length
    # The repetition may begin further to the left.
    while start and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Repetition(start, period)


def _distance_to_repeat(text: str, length: int) -> int | None:
    """Return how many characters before the last `length` characters their previous occurrence is.

    Return None if they occur nowhere else. The reversed text is searched forwards, because CPython's `find`
    takes linear time (two-way search), while its `rfind` compares anew at each position.
    """
    reversed_text = text[::-1]
    distance = reversed_text.find(reversed_text[:length], 1)
    return None if distance < 0 else distance


def repeats_in_prompt(prompt: str | Sequence[int], output: str | Sequence[int]) -> bool:
    """Tell whether the repetition at the end of an output is also in the prompt.

    If so, the prompt may have asked for it. Prompt and output must both be texts, or both be token ids.
    """
    prompt_text, output_text = _as_text(prompt), _as_text(output)
    # The last characters of a periodic text also occur one period earlier.
    period = _distance_to_repeat(output_text, min(len(output_text) // 2, LEAST_IN_PROMPT))
    if not period:
        return False
    # The prompt must have at least two periods in a row, and LEAST_IN_PROMPT characters.
    periods = max(2, math.ceil(LEAST_IN_PROMPT / period))
    return output_text[-period:] * periods in prompt_text


def _as_text(sequence: str | Sequence[int]) -> str:
    """Return token ids as a text, because substrings of texts are found fast."""
    return sequence if isinstance(sequence, str) else "".join(map(chr, sequence))
