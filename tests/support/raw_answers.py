"""Answers that a test writes itself, for the server that answers as SGLang does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


TOOL_CALL: dict[str, Any] = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "thought": ("length", {"reasoning_content": "The user asks"}),
    "tool call": ("tool_calls", {"tool_calls": [TOOL_CALL]}),
}
"""What a chat without text has instead, after its finish reason."""

# what the real server says: in an answer with 200 whose finish reason is an abort, or as an HTTP error
ABORTS: dict[str, tuple[int, str]] = {
    "abort": (500, "Aborted by the engine"),
    "abort 400": (400, "The input is not for this model."),
    "abort 503": (503, "The request queue is full."),
}
REFUSALS: dict[str, tuple[int, str]] = {
    "busy 429": (429, "Too many requests"),
    "busy 503": (503, "The request queue is full."),
    "broken 500": (500, "Out of memory of the last running request"),
    "too long": (400, "The input (6001 tokens) is longer than the model's context length (4096 tokens)."),
    "bad schema": (
        400,
        "Failed to compile json grammar: Expecting property name in double quotes: line 1 column 2 (char 1)",
    ),
}
