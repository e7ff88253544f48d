"""The corners: what a scheduler's waiting requests and its token usage say together, in a word."""

from enum import StrEnum


class Corner(StrEnum):
    """Where a scheduler is; the values are in the event log and in report.json."""

    SHORT = "short"
    FULL = "full"
    GOOD = "good"
    FILLING = "filling"
    HELD = "held"

    @property
    def words(self) -> str:
        """The corner in a few words, for the display."""
        return _WORDS[self]


_WORDS = {
    Corner.SHORT: "queue short",
    Corner.FULL: "KV pool full",
    Corner.GOOD: "KV pool well used",
    Corner.FILLING: "KV pool fills up",
    Corner.HELD: "server holds back",
}
