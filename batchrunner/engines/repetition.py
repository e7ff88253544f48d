"""Finds answers that repeat themselves without end, by their text so far, in linear time.

A model that falls into a loop writes the same characters again and again until `max_new_tokens`. A text
repeats itself if its end is periodic: each character equals the character one period before it. Tables, logs
and poems repeat characters too. So the periodic end counts only if it is long, in characters and in periods.

However long the periodic end is, it may still be data: some tables, logs and images in base64 have thousands
of equal records in a row. Prose has none. So by default, a run stops an answer only if it repeats prose.
docs/benchmarks.md has the rates of false alarms.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import category

LEAST_CHARACTERS = 2048
"""Minimum number of characters in the periodic end of a text: about 500 tokens of English."""
LEAST_PERIODS = 6
"""Minimum number of periods in the periodic end of a text, the first period included."""
LONGEST_PERIOD = 2048
"""Maximum length of a period in characters. Longer ones are not searched for."""
REPEATED_CHARACTERS = LEAST_CHARACTERS - LEAST_CHARACTERS // LEAST_PERIODS
"""Number of characters at the end of a text that must also occur one period earlier: the shortest repetition
without its first period."""
PROBE = 64
"""Number of characters at the end of a text that are searched for first, because the end of most answers
occurs only once."""
LEAST_IN_PROMPT = 64
"""Minimum length of a repetition in a prompt, in characters or token ids. Shorter repetitions, such as rules
and indentation, are common in prompts."""
PROMPT_WINDOWS = {str: (512, 4096), list: (128, 1024)}
"""Sizes of the windows in which a repetition is searched for in a prompt: characters of a text, or token
ids."""
LEAST_MENTIONED = 0.75
"""Share of a period that a prompt must contain to mention the period. A prompt may quote the period without
its line break, or with another first token."""
LEAST_LETTERS = 0.6
"""Minimum share of letters, their marks and spaces in prose. Lists of ingredients and other short lines have
0.7, rows of numbers far less."""
_SENTENCE = re.compile(r"(?:\b[a-z']+,? ){8}")
"""Matches eight plain words in a row. In texts that were measured, lines of a log that recur without a change
have at most five."""
_SEPARATE_WORDS = re.compile(r" |[\u0e00-\u109f\u1780-\u17ff]|[^\x00-\u2e7f]")
"""Matches a space, or a character of a script that needs no spaces: Thai, Lao, Tibetan, Burmese, Khmer,
Chinese, Japanese. Base64, DNA and a column of a table have neither."""
_MARKS_OF_DATA = re.compile(r"""[{}\[\]<>=|+_\\"\t]|\w\(|[.,;:][^\s.')*\u2019\u201d]|(?<![.!?:])  (?!\n)""")
"""Matches the marks of code, tables and logs: brackets, quotes, operators, a call, columns that are aligned
by spaces, or a punctuation mark without a space after it, as in `a.b`, in CSV and in times of day."""


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
    is_too_short = len(text) < LEAST_CHARACTERS
    if is_too_short or text[-PROBE:] not in text[-LONGEST_PERIOD - PROBE : -1]:
        return None
    period = _distance_to_repeat(text[-LONGEST_PERIOD - REPEATED_CHARACTERS :], REPEATED_CHARACTERS)
    if period is None:
        return None
    # The repetition must have at least LEAST_PERIODS periods and LEAST_CHARACTERS characters. Only its last
    # REPEATED_CHARACTERS characters have been compared so far.
    length = max(LEAST_CHARACTERS, LEAST_PERIODS * period)
    if len(text) < length or text[-length + period :] != text[-length:-period]:
        return None
    start = len(text) - length
    # The repetition may begin further to the left.
    while start and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Repetition(start, period)


def is_prose(period: str) -> bool:
    """Tell whether the text of one period is prose, and not code, a row of a table, or encoded data."""
    # A sentence or a mark may lie across the end of the period.
    two_periods = period * 2
    if _SENTENCE.search(two_periods) is not None:
        return True
    # In many scripts of South and South-East Asia, a third of the characters are marks, such as vowel signs.
    letters = sum(character == " " or category(character)[0] in "LM" for character in period)
    return (
        letters >= LEAST_LETTERS * len(period)
        and _SEPARATE_WORDS.search(period) is not None
        and _MARKS_OF_DATA.search(two_periods) is None
    )


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


def is_mentioned(prompt: str | Sequence[int], output: str | Sequence[int]) -> bool:
    """Tell whether a prompt contains one period of the repetition at the end of an output, or most of it.

    Such a prompt may ask for the repetition: "Write this sentence 500 times". Prompt and output must both be
    texts, or both be token ids.
    """
    prompt_text, output_text = _as_text(prompt), _as_text(output)
    period = _distance_to_repeat(output_text, min(len(output_text) // 2, LEAST_IN_PROMPT))
    if not period:
        return False
    length = math.ceil(LEAST_MENTIONED * period)
    two_periods = output_text[-2 * period :]
    # A prompt that contains a whole period, wherever it begins, contains each part that starts in the first
    # quarter of that period. So for a long period, a part for each sixteenth of it is enough.
    starts = range(0, period, max(1, period // 16))
    return any(two_periods[start : start + length] in prompt_text for start in starts)


def repeats_itself(prompt: str | Sequence[int]) -> bool:
    """Tell whether a part of a prompt is periodic: at least one window, with two periods or more.

    An answer may have to repeat such a part in other words, as in a translation.
    """
    text = _as_text(prompt)
    for size in PROMPT_WINDOWS[str if isinstance(prompt, str) else list]:
        half = size // 2
        for start in range(0, len(text) - size + 1, size):
            window = text[start : start + size]
            # The second half of a periodic window also occurs one period earlier.
            if window.find(window[half:]) < half:
                return True
    return False


def _as_text(sequence: str | Sequence[int]) -> str:
    """Return token ids as a text, because substrings of texts are found fast."""
    return sequence if isinstance(sequence, str) else "".join(map(chr, sequence))
