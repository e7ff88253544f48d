"""Regular expressions over answers, in a time that is bounded, whatever the answer."""

from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from batchrunner.output.arrow_arrays import arrow_scalar

LONGEST_S = 0.2
"""Seconds after which a search is given up: rows wait for it."""


class PatternTimeoutError(Exception):
    """A search that took too long."""


class Pattern:
    """A regular expression.

    Arrow's dialect (RE2) never takes long, whatever the text. It has no lookaround and no backreferences:
    Python's dialect is used for an expression that needs these, with a time limit.
    """

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        """The expression as it was given."""
        self.is_linear = _is_linear(pattern)
        """Whether a search takes a time in proportion to the text."""

    def is_in(self, text: str) -> bool:
        """Tell whether a text contains a match; raises PatternTimeoutError after LONGEST_S seconds."""
        if self.is_linear:
            given = arrow_scalar(text, pa.string())
            return bool(pc.match_substring_regex(given, self.text).as_py())
        import regex  # noqa: PLC0415 - only for such expressions; `re` has no time limit

        try:
            return regex.search(self.text, text, timeout=LONGEST_S) is not None
        except TimeoutError:
            raise PatternTimeoutError from None


@lru_cache(1024)
def _is_linear(pattern: str) -> bool:
    try:
        pc.match_substring_regex(arrow_scalar("", pa.string()), pattern)
    except pa.ArrowInvalid:
        return False
    return True
