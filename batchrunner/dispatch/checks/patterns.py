"""Regular expressions over answers, in a time that grows with the text only."""

import re
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc


class Pattern:
    """A regular expression.

    Arrow's dialect (RE2) never takes long, whatever the text. It has no lookaround and no backreferences:
    Python's dialect is used for an expression that needs these.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._is_linear = _is_linear(pattern)

    def is_in(self, text: str) -> bool:
        """Tell whether a text contains a match."""
        if self._is_linear:
            given = pa.scalar(text.encode("utf-8", "replace").decode(), pa.string())
            return bool(pc.match_substring_regex(given, self._pattern).as_py())
        return re.search(self._pattern, text) is not None


@lru_cache(1024)
def _is_linear(pattern: str) -> bool:
    try:
        pc.match_substring_regex(pa.scalar("", pa.string()), pattern)
    except pa.ArrowInvalid:
        return False
    return True
