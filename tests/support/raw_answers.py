"""Answers that a test writes itself, for the server that answers as SGLang does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an answer with status 200."""

    content: bytes


@dataclass(frozen=True, slots=True)
class OnWire:
    """All bytes of an HTTP answer, after which the connection ends."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Endless:
    """An answer of events that does not end after them."""

    events: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """The text of a good answer."""

    text: str
