"""Puts images into prompts: where templates and conversations have them, or before the text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.images import PromptImage
from batchrunner.input.column_source import ColumnSource
from batchrunner.input.images.columns import ImageColumn
from batchrunner.job.prompt import PromptSpec

_LLAVA = "<image>"
"""What stands for an image in texts of LLaVA's form."""
USER, ASSISTANT = "user", "assistant"


class Marks(list[str]):
    """What stands for the images of a column while a template is rendered; printed, one after the other."""

    def __str__(self) -> str:
        return "".join(self)


class _Placing:
    """The images of one prompt, in the order in which it has them."""

    def __init__(self, given: Sequence[PromptImage]) -> None:
        self._given = given
        self.images: list[PromptImage] = []

    def part(self, index: int) -> dict[str, Any]:
        """Return the part of a content for one of the given images."""
        self.images.append(self._given[index])
        return {"type": "image", "image": len(self.images) - 1}


class ImagePrompts:
    """Makes the prompts of rows with images."""

    def __init__(
        self,
        prompt: PromptSpec,
        source: ColumnSource,
        prompt_of: Callable[[dict[str, Any]], Any],
        printed: Collection[str],
    ) -> None:
        """`prompt_of` makes prompts whose templates print these columns. Raises JobError or InputError."""
        self._prompt_of = prompt_of
        self._columns: list[ImageColumn] = []
        self._page_column = None
        if prompt.images is not None:
            self._columns += [ImageColumn(name, prompt.images, source) for name in prompt.images.columns]
        if prompt.pdf is not None:
            self._columns.append(ImageColumn(prompt.pdf.column, prompt.pdf, source))
            self._page_column = prompt.pdf.page_column
        self._printed = {column.name for column in self._columns} & {*printed}
        self._is_text = prompt.text is not None
        self._from_column = isinstance(prompt.messages, str)
        self._placeholder = prompt.images.placeholder if prompt.images is not None else None
        if self._is_text and self._printed and self._placeholder is None:
            raise JobError(
                f"prompt.text: nothing is known to stand for the images of {min(self._printed)!r}",
                hint="give images.placeholder, the model's own token, or leave the column out",
            )
        self._secret = secrets.token_hex(8)  # no value of a row can contain it
        self._mark = re.compile(f"\ue000{self._secret}:(\\d+)\ue001")
        pages = () if self._page_column is None else (self._page_column,)
        self.columns = [*(column.name for column in self._columns), *pages]

    def prompt(self, ordinal: int, row: dict[str, Any]) -> tuple[Any, tuple[PromptImage, ...]]:
        """Return the prompt of a row and its images; raises RowRefusedError."""
        given: list[PromptImage] = []
        first: list[int] = []  # those that no template places
        marked = dict(row)
        for column in self._columns:
            value = row[column.name]
            if value is None and column.name in self._printed:
                continue  # the template may do without
            start = len(given)
            given += column.images(ordinal, value, row[self._page_column] if self._page_column else None)
            marks = Marks(f"\ue000{self._secret}:{index}\ue001" for index in range(start, len(given)))
            marked[column.name] = marks if column.holds_lists else str(marks)
            if column.name not in self._printed:
                first += range(start, len(given))
        prompt = self._prompt_of(marked)
        placing = _Placing(given)
        if self._is_text:
            return self._text(prompt, first, placing), tuple(placing.images)
        if self._from_column:
            return self._conversation(prompt, first, placing), tuple(placing.images)
        shown = {int(n) for message in prompt for n in self._mark.findall(message["content"])}
        first = [index for index in first if index not in shown]  # a loop prints what no name does
        users = [at for at, message in enumerate(prompt) if message["role"] == USER]
        target = users[-1] if users else 0
        messages = [
            {**message, "content": self._content(message["content"], first if at == target else (), placing)}
            for at, message in enumerate(prompt)
        ]
        return messages, tuple(placing.images)

    def _content(self, text: str, first: Sequence[int], placing: _Placing) -> Any:
        """Return the content of a message: `first` images, then the text with images where its marks are."""
        pieces = self._mark.split(text)  # text, number, text, …
        self._check_marks(pieces[::2])
        if not first and len(pieces) == 1:
            return text
        parts = [placing.part(index) for index in first]
        for at, piece in enumerate(pieces):
            if at % 2:
                parts.append(placing.part(int(piece)))
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _text(self, text: str, first: Sequence[int], placing: _Placing) -> str:
        """Return a prompt without a chat template, with placeholders for its images."""
        pieces = self._mark.split(text)
        self._check_marks(pieces[::2])
        shown = {int(index) for index in pieces[1::2]}
        before = [index for index in first if index not in shown]
        for index in (*before, *map(int, pieces[1::2])):
            placing.part(index)
        placeholder = self._placeholder or ""
        pieces[1::2] = [placeholder] * len(pieces[1::2])
        return placeholder * len(before) + "".join(pieces)

    def _check_marks(self, texts: Sequence[str]) -> None:
        if any(self._secret in text for text in texts):
            raise RowRefusedError("template: changes what stands for an image: print its column as it is")

    def _conversation(
        self, messages: list[dict[str, Any]], images: Sequence[int], placing: _Placing
    ) -> list[dict[str, Any]]:
        """Put images into a conversation: where it has parts or `<image>` for them, or before its text."""
        bare = sum(map(_is_bare, _parts(messages)))
        if bare:
            if bare != len(images):
                raise RowRefusedError(
                    f"prompt.images: the messages have {bare} parts of type image, "
                    f"and the row has {len(images)} images"
                )
            left = iter(images)
            return [_filled(message, left, placing) for message in messages]
        marks = sum(_texts(message).count(_LLAVA) for message in messages if message["role"] == USER)
        if images and marks == len(images):
            left = iter(images)
            return [_split(message, left, placing) for message in messages]
        if not images:
            return messages
        target = next((at for at, message in enumerate(messages) if message["role"] == USER), 0)
        content = messages[target].get("content") or []
        own = [{"type": "text", "text": content}] if isinstance(content, str) else content
        first = {**messages[target], "content": [*map(placing.part, images), *own]}
        return [*messages[:target], first, *messages[target + 1 :]]


def _parts(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_bare(part: Any) -> bool:
    """Tell whether a part stands for an image that is elsewhere, as in the chats of Hugging Face."""
    others = {name: value for name, value in part.items() if name != "type" and value}
    return part.get("type") == "image" and not others


def _filled(message: dict[str, Any], images: Any, placing: _Placing) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [placing.part(next(images)) if _is_bare(part) else part for part in content]
    return {**message, "content": parts}


def _texts(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _split(message: dict[str, Any], images: Any, placing: _Placing) -> dict[str, Any]:
    text = _texts(message)
    if message["role"] != USER or _LLAVA not in text:
        return message
    parts: list[dict[str, Any]] = []
    for at, piece in enumerate(text.split(_LLAVA)):
        if at:
            parts.append(placing.part(next(images)))
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return {**message, "content": parts}
