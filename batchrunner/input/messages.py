"""Reads conversations and tools from columns, in OpenAI's or ShareGPT's format.

The values may be structs or JSON texts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Tools
from batchrunner.input.dataset import is_list
from batchrunner.job.arrow_types import is_text
from batchrunner.job.prompt import tool_problem

ASSISTANT = "assistant"
_OPENAI = ("system", "user", ASSISTANT, "tool", "function", "developer", "latest_reminder", "root")
"""Roles that SGLang's chat endpoint (0.5.23) accepts. Only some models support the last two."""
ROLES = {
    **{role: role for role in _OPENAI},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT),
    "human": "user",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of the chat endpoint, by their names in OpenAI's and ShareGPT's formats."""
_TEXT_PARTS = {"text", "input_text"}


def holds_messages(kind: pa.DataType) -> bool:
    """Tell whether a column of this type may hold conversations (texts, or lists of structs)."""
    if not is_list(kind) or not pt.is_struct(kind.value_type):
        return is_text(kind)
    names = {field.name for field in kind.value_type}
    return {"role", "content"} <= names or {"from", "value"} <= names


def messages_in(column: str, row: Mapping[str, Any], *, continues: bool) -> list[dict[str, Any]]:
    """Return the messages in a column of a row, in the format of the chat endpoint.

    With `continues`, the last message may be an unfinished assistant message, which the model continues.
    Raises RowRefusedError if the column has no valid messages.
    """
    label, value = f"prompt: column {column!r}", row[column]
    if value is None:
        raise RowRefusedError(f"{label} is null")
    if isinstance(value, str):
        # A text without visible characters is not JSON. It counts as empty, like an empty list.
        value = _parsed(label, value) if value.strip() else []
        if not isinstance(value, list):
            raise RowRefusedError(f"{label}: the JSON is not a list of messages")
    if not value:
        raise RowRefusedError(f"{label} is empty")
    return conversation(label, value, continues=continues)


def conversation(label: str, row_messages: Sequence[Any], *, continues: bool) -> list[dict[str, Any]]:
    """Return messages in the format of the chat endpoint.

    With `continues`, the model continues an assistant message at the end. Otherwise assistant messages at the
    end are removed. Raises RowRefusedError, whose text begins with `label`, for invalid messages.
    """
    messages = []
    for number, item in enumerate(row_messages, 1):
        try:
            messages.append(_message(item))
        except ValueError as problem:
            raise RowRefusedError(f"{label}: message {number} has {problem}") from None
    while not continues and messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    if all(message["role"] == ASSISTANT for message in messages):
        raise RowRefusedError(f"{label}: all messages are from the assistant")
    return messages


def _message(item: Any) -> dict[str, Any]:
    """Return a message with the role that the chat endpoint uses.

    Raises ValueError. Its text completes the words "message N has".
    """
    if not isinstance(item, Mapping):
        raise ValueError("no role")  # noqa: TRY004 - the data is wrong, not the call
    message = _without_null_fields(item)
    if "role" not in message and "content" not in message:  # ShareGPT's form
        message = {"role": message.get("from"), "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise ValueError(f"the unknown role {role!r}" if role else "no role")
    message["role"] = ROLES[role.strip().lower()]
    # A message that only calls tools may lack content.
    if content is not None or not message.get("tool_calls"):
        message["content"] = content if isinstance(content, str) else _joined(content)
    return message


def _joined(content: Any) -> Any:
    """Return the content of a message whose `content` is a list of parts.

    Texts are joined by spaces, as SGLang mostly does, if there are no other parts. Raises ValueError for
    invalid content. The error's text completes the words "message N has".
    """
    if not isinstance(content, list) or not content:
        raise ValueError("content that is not text")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts):
        raise ValueError("a part without a type")
    if not all(part["type"] in _TEXT_PARTS for part in parts):
        # Parts with media cannot be joined, so the list is kept.
        return [*map(_without_null_fields, parts)]
    texts: list[Any] = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a part of type text without a text")
    return " ".join(texts)


def tools_in(column: str, choice: Any, value: Any) -> Tools | None:
    """Return the tools in a column's value; None if the value is null or empty.

    `choice` is the job's `tool_choice`. Raises RowRefusedError for an invalid list of tools.
    """
    label = f"prompt.tools: column {column!r}"
    if isinstance(value, str):
        # CSV has an empty text in place of a null.
        value = _parsed(label, value) if value.strip() else None
    else:
        value = _without_nulls(value)
    if value is None or value == []:
        return None
    problem = tool_problem(value)
    if problem is not None:
        raise RowRefusedError(f"{label}: {problem}")
    return Tools(value, choice, by_row=True)


def _parsed(label: str, text: str) -> Any:
    """Return the value of a JSON text; raise RowRefusedError if it is invalid.

    The error's text begins with `label`.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as failure:
        raise RowRefusedError(f"{label}: not JSON: {failure}") from None


def _without_null_fields(struct: Mapping[str, Any]) -> dict[str, Any]:
    """Return a struct without its null fields.

    In Parquet, all structs of a column have the same fields, so missing fields become nulls.
    """
    return {name: value for name, value in struct.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    """Remove null fields from structs at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in _without_null_fields(value).items()}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
