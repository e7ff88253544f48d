"""Puts files into prompts: where templates and conversations have them, or before the text."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from batchrunner.core.errors import JobError, RowRefusedError
from batchrunner.core.media import KINDS, KindName, MediaKind, PromptFile
from batchrunner.input.dataset import ColumnSource
from batchrunner.input.media.columns import FileColumn
from batchrunner.job.prompt import PromptSpec

USER, ASSISTANT = "user", "assistant"


class Marks(list[str]):
    """What stands for the files of a column while a template is rendered; printed, one after the other."""

    def __str__(self) -> str:
        return "".join(self)


class _Placing:
    """The files of one prompt, in the order in which it has them."""

    def __init__(self, given: Sequence[PromptFile]) -> None:
        self._given = given
        self.files: list[PromptFile] = []

    def part(self, index: int) -> dict[str, Any]:
        """Return the part of a content for one of the given files."""
        name = self.kind_of(index).name
        self.files.append(self._given[index])
        return {"type": name, name: len(self.files) - 1}

    def kind_of(self, index: int) -> MediaKind:
        """Return what one of the given files is."""
        return self._given[index].kind

    def by_kind(self, indices: Sequence[int]) -> dict[KindName, list[int]]:
        """Return the given files of each kind, by the kind's name."""
        return {name: [index for index in indices if self.kind_of(index).name == name] for name in KINDS}


class MediaPrompts:
    """Makes the prompts of rows with files."""

    def __init__(
        self,
        prompt: PromptSpec,
        source: ColumnSource,
        prompt_of: Callable[[dict[str, Any]], Any],
        printed: Collection[str],
    ) -> None:
        """`prompt_of` makes prompts whose templates print these columns. Raises JobError or InputError."""
        self._prompt_of = prompt_of
        self._columns = [
            FileColumn(name, spec, source, field)
            for field, spec in prompt.media.items()
            for name in prompt.columns_of(field)
        ]
        self._page_column = None if prompt.pdf is None else prompt.pdf.page_column
        self._printed = {column.name for column in self._columns} & {*printed}
        self._is_text = prompt.text is not None
        self._from_column = isinstance(prompt.messages, str)
        specs = ((kind, getattr(prompt, kind.field)) for kind in KINDS.values())
        self._placeholders: dict[str, str] = {
            kind.field: spec.placeholder for kind, spec in specs if spec and spec.placeholder is not None
        }
        if self._is_text:
            self._check_placeholders()
        self._secret = secrets.token_hex(8)  # no value of a row can contain it
        self._mark = re.compile(f"\ue000{self._secret}:(\\d+)\ue001")
        pages = () if self._page_column is None else (self._page_column,)
        self.columns = [*(column.name for column in self._columns), *pages]

    def prompt(self, ordinal: int, row: dict[str, Any]) -> tuple[Any, tuple[PromptFile, ...]]:
        """Return the prompt of a row and its files; raises RowRefusedError."""
        given: list[PromptFile] = []
        first: list[int] = []  # those that no template places
        marked = dict(row)
        for column in self._columns:
            value = row[column.name]
            if value is None and column.name in self._printed:
                continue  # the template may do without
            start = len(given)
            given += column.files(ordinal, value, row[self._page_column] if self._page_column else None)
            marks = Marks(f"\ue000{self._secret}:{index}\ue001" for index in range(start, len(given)))
            marked[column.name] = marks if column.holds_lists else str(marks)
            if column.name not in self._printed:
                first += range(start, len(given))
        prompt = self._prompt_of(marked)
        placing = _Placing(given)
        if self._is_text:
            return self._text(prompt, first, placing), tuple(placing.files)
        if self._from_column:
            return _conversation(prompt, first, placing), tuple(placing.files)
        shown = {int(n) for message in prompt for n in self._mark.findall(message["content"])}
        first = [index for index in first if index not in shown]  # a loop prints what no name does
        users = [at for at, message in enumerate(prompt) if message["role"] == USER]
        target = users[-1] if users else 0
        messages = [
            {**message, "content": self._content(message["content"], first if at == target else (), placing)}
            for at, message in enumerate(prompt)
        ]
        return messages, tuple(placing.files)

    def _content(self, text: str, first: Sequence[int], placing: _Placing) -> Any:
        """Return the content of a message: `first` files, then the text with files where its marks are."""
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
        """Return a prompt without a chat template, with placeholders for its files."""
        pieces = self._mark.split(text)
        self._check_marks(pieces[::2])
        inside = [*map(int, pieces[1::2])]
        before = [index for index in first if index not in {*inside}]
        for index in (*before, *inside):
            placing.part(index)
        pieces[1::2] = [self._placeholder(placing, index) for index in inside]
        return "".join([*(self._placeholder(placing, index) for index in before), *pieces])

    def _placeholder(self, placing: _Placing, index: int) -> str:
        return self._placeholders.get(placing.kind_of(index).field, "")

    def _check_placeholders(self) -> None:
        """Raise JobError where a text prints a column, and nothing is known to stand for its files."""
        bare = [column for column in self._columns if column.field not in self._placeholders]
        shown = sorted((column.name, column.field) for column in bare if column.name in self._printed)
        if shown:
            name, field = shown[0]
            raise JobError(
                f"prompt.text: nothing is known to stand for the {field} of {name!r}",
                hint=f"give {field}.placeholder, the model's own token, or leave the column out",
            )

    def _check_marks(self, texts: Sequence[str]) -> None:
        if any(self._secret in text for text in texts):
            raise RowRefusedError("template: changes what stands for a file: print its column as it is")


def _conversation(
    messages: list[dict[str, Any]], files: Sequence[int], placing: _Placing
) -> list[dict[str, Any]]:
    """Put files into a conversation, of each kind where it has parts or marks for it, or before its text."""
    kinds = placing.by_kind(files)
    bare = Counter(_bare_kind(part) for part in _parts(messages))
    users = [_texts(message) for message in messages if message["role"] == USER]
    filled, marked = dict[str, Iterator[int]](), dict[str, Iterator[int]]()
    first: list[int] = []
    for name, indices in kinds.items():
        if wanted := bare[name]:
            _check_count(name, wanted, len(indices))
            filled[name] = iter(indices)
        elif indices and sum(text.count(KINDS[name].mark) for text in users) == len(indices):
            marked[name] = iter(indices)
        else:
            first += indices
    found = [_placed(message, filled, marked, placing) for message in messages]
    if not first:
        return found
    target = next((at for at, message in enumerate(found) if message["role"] == USER), 0)
    content = found[target].get("content") or []
    own = [{"type": "text", "text": content}] if isinstance(content, str) else content
    found[target] = {**found[target], "content": [*map(placing.part, first), *own]}
    return found


def _check_count(name: KindName, wanted: int, given: int) -> None:
    """Raise RowRefusedError where a conversation has another number of parts than the row has files."""
    if wanted != given:
        field = KINDS[name].field
        raise RowRefusedError(
            f"prompt.{field}: the messages have {wanted} parts of type {name}, "
            f"and the row has {given} {field if field != name else 'files of it'}"
        )


def _parts(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content]


def _bare_kind(part: Any) -> str | None:
    """Return which kind of file a part stands for that is elsewhere, as in the chats of Hugging Face."""
    others = {name: value for name, value in part.items() if name != "type" and value}
    name = part.get("type")
    return name if isinstance(name, str) and name in KINDS and not others else None


def _texts(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _placed(
    message: dict[str, Any],
    filled: Mapping[str, Iterator[int]],
    marked: Mapping[str, Iterator[int]],
    placing: _Placing,
) -> dict[str, Any]:
    """Return a message with files in the place of its parts that stand for some, or of marks in its text."""
    content = message.get("content")
    if isinstance(content, list):
        kinds = [_bare_kind(part) for part in content]
        parts = [
            part if kind is None or kind not in filled else placing.part(next(filled[kind]))
            for part, kind in zip(content, kinds, strict=True)
        ]
        return {**message, "content": parts}
    pattern = "|".join(re.escape(f"<{name}>") for name in marked)
    if message["role"] != USER or not pattern or not re.search(pattern, _texts(message)):
        return message
    parts = []
    for at, piece in enumerate(re.split(f"({pattern})", _texts(message))):  # text, mark, text, …
        if at % 2:
            parts.append(placing.part(next(marked[piece[1:-1]])))
        elif piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return {**message, "content": parts}
