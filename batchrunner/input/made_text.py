"""The texts that a row's template makes: their lengths are checked before they are in memory."""

import threading
from collections.abc import Iterable

LONGEST_TEXT = 64 << 20
"""Most characters of a text that a template makes: far more than any model reads."""
_MOST_PARTS = 1_000_000
"""Most pieces of such a text. Each takes some 60 bytes."""
_LARGE = 1 << 20
"""Characters from which a text counts for `_MOST_MADE`."""
_MOST_MADE = 32 * LONGEST_TEXT
"""Most characters of all large texts that are made for one row, which a template may keep in a list."""


class TooLargeError(ValueError):
    """A template makes a value that no prompt needs, and that would fill the memory."""


class _Made(threading.local):
    characters = 0


_MADE = _Made()
"""Characters of the large texts that this thread has made for its row."""


def begin_row() -> None:
    """Count anew what this thread makes: it renders another row."""
    _MADE.characters = 0


def check_length(length: int) -> None:
    """Count a text that is about to be made; raises TooLargeError where no prompt needs it."""
    if length < _LARGE:
        return
    if length > LONGEST_TEXT:
        raise TooLargeError(f"a value of {length} characters is too large")
    _MADE.characters += length
    if _MADE.characters > _MOST_MADE:
        raise TooLargeError(f"the texts of one row are too large ({_MADE.characters} characters)")


class Parts(list[str]):
    """The pieces of a text, or of a block in it; raises TooLargeError before they are too many."""

    def __init__(self) -> None:
        super().__init__()
        self._characters = 0

    def append(self, part: str) -> None:
        """Add a piece."""
        self._characters += len(part)
        if self._characters > LONGEST_TEXT or len(self) >= _MOST_PARTS:
            raise TooLargeError(f"a text of {self._characters} characters in {len(self)} parts is too large")
        super().append(part)

    def extend(self, parts: Iterable[str]) -> None:
        """Add pieces."""
        for part in parts:
            self.append(part)

    def text(self) -> str:
        """Return the text."""
        check_length(self._characters)
        return "".join(self)
