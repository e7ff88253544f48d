"""Conversations: messages of a column (OpenAI's or ShareGPT's form, also as JSON), or of templates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import RowRefusedError
from batchrunner.input.templates import Template
from batchrunner.job.prompt import MessageTemplate

ASSISTANT = "assistant"
ROLES = {
    **{
        role: role
        for role in (
            *("system", "user", ASSISTANT, "tool", "function", "developer"),
            *("latest_reminder", "root"),  # of some models; SGLang 0.5.23 knows them
        )
    },
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of the chat endpoint, by the names that OpenAI's and ShareGPT's forms have for them."""
_TEXT_PARTS = {"text", "input_text"}
"""Types of parts of a content that are texts."""
WANTED = "a list of {role, content} or {from, value}, or JSON texts of such lists"


def holds_messages(kind: pa.DataType) -> bool:
    """Return whether a column of this type may hold conversations."""
    if pt.is_dictionary(kind):
        kind = kind.value_type
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind):
        return True
    if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
        return False
    names = {field.name for field in kind.value_type} if pt.is_struct(kind.value_type) else set()
    return {"role", "content"} <= names or {"from", "value"} <= names


class MessagesColumn:
    """Takes conversations from a column."""

    def __init__(self, column: str, *, continues: bool) -> None:
        """With `continues` the model goes on with an assistant's last message, which else is left out."""
        self._column = column
        self._talk = Conversation(f"prompt: column {column!r}", continues=continues)
        self.columns = [column]

    def prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a row; raises RowRefusedError where they are no conversation."""
        value = row[self._column]
        if value is None:
            raise RowRefusedError(f"prompt: column {self._column!r} is null")
        if isinstance(value, str) and value.strip():
            value = self._parsed(value)
        if not value:
            raise RowRefusedError(f"prompt: column {self._column!r} is empty")
        return self._talk.messages(value)

    def _parsed(self, text: str) -> list[Any]:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as failure:
            raise self._talk.refused(f"not JSON: {failure.msg} (character {failure.pos + 1})") from None
        if not isinstance(value, list):
            raise self._talk.refused("its JSON is no list of messages")
        return value


class Conversation:
    """Makes messages of the chat endpoint from those that a user has, in any of the known forms."""

    def __init__(self, label: str, *, continues: bool) -> None:
        """`label` says in errors where the messages come from; `continues` is as for MessagesColumn."""
        self._label = label
        self._continues = continues

    def messages(self, value: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the messages; raises RowRefusedError where they are no conversation."""
        messages = [self._message(number, given) for number, given in enumerate(value, 1)]
        if not self._continues:
            while messages and messages[-1]["role"] == ASSISTANT:
                messages.pop()
        if all(message["role"] == ASSISTANT for message in messages):
            raise self.refused("only the assistant speaks in it")
        return messages

    def _message(self, number: int, given: Any) -> dict[str, Any]:
        """Return a message of the chat endpoint."""
        if not isinstance(given, Mapping):
            raise self.refused(f"message {number} is {'null' if given is None else 'no object'}")
        message = {name: value for name, value in given.items() if value is not None}
        if "role" in message or "content" in message:
            role, content = message.get("role"), message.get("content")
        else:
            role, content = message.get("from"), message.get("value")
            message = {}
        if role is None:
            raise self.refused(f"message {number} has no role")
        known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
        if known is None:
            raise self.refused(f"message {number} has the unknown role {role!r}")
        if content is None and message.get("tool_calls"):  # an assistant that calls a tool says nothing
            return {**message, "role": known}
        return {**message, "role": known, "content": self._content(number, content)}

    def _content(self, number: int, content: Any) -> Any:
        """Return a content; parts that are all texts are joined by spaces, as SGLang does for most models."""
        if content is None:
            raise self.refused(f"the content of message {number} is null")
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise self.refused(f"the content of message {number} is no text")
        parts = [_part(part) for part in content]
        if None in parts:
            raise self.refused(f"the content of message {number} has a part without a type")
        if all(part["type"] in _TEXT_PARTS for part in parts if part):
            texts = [part.get("text") for part in parts if part]
            if not all(isinstance(text, str) for text in texts):
                raise self.refused(f"the content of message {number} has a part of type text without one")
            return " ".join(map(str, texts))
        return parts

    def refused(self, why: str) -> RowRefusedError:
        """Return the error of a row, with the reason."""
        return RowRefusedError(f"{self._label}: {why}")


def _part(part: Any) -> dict[str, Any] | None:
    """Return a part of a content without nulls; None for what is no part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return None
    return {name: value for name, value in part.items() if value is not None}


class MessageTemplates:
    """Makes conversations of templates, one for each message."""

    def __init__(self, messages: Sequence[tuple[str, str, str]], available: Collection[str]) -> None:
        """`messages` are the place in the job, the role and the template of each; raises JobError."""
        self._messages = [
            (role, Template(source, where=where, available=available)) for where, role, source in messages
        ]
        self.columns = sorted({name for _, template in self._messages for name in template.columns})
        self.templates = {
            where: template for (where, _, _), (_, template) in zip(messages, self._messages, strict=True)
        }
        """The templates by their place in the job."""

    def prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a row; raises RowRefusedError where a template fails on its values."""
        return [{"role": role, "content": template.render(row)} for role, template in self._messages]


def from_list(messages: Sequence[MessageTemplate]) -> list[tuple[str, str, str]]:
    """Return the place, role and template of each message of `prompt.messages`."""
    return [
        (f"prompt.messages.{number}.content", message.role, message.content)
        for number, message in enumerate(messages)
    ]
