"""Finds the files that the columns of a row hold or name, and places them in the prompt."""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, JobError, RowRefusedError
from batchrunner.core.media import KIND_OF_FIELD, KINDS, MediaRules, PromptFile, page_ranges
from batchrunner.input.dataset import ColumnSource, is_bytes, is_list
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.prompt import ImagesSpec, MediaSpec, PdfSpec, PromptSpec

USUAL_TOKENS = 1024
"""Estimated tokens of a file that has not been opened yet."""
_LONGEST_NAME = 120
_USER = "user"


class Marks(list[str]):
    """Marks that stand for the files of a column while a template is rendered.

    A template can loop over the marks, or print all of them at once.
    """

    def __str__(self) -> str:
        return "".join(self)


class FileColumn:
    """A column with images, audio, videos or PDF documents."""

    def __init__(self, name: str, field: str, spec: MediaSpec | PdfSpec, source: ColumnSource) -> None:
        """Check the type of the column, which `prompt.FIELD` names; raises InputError."""
        self.name, self.field = name, field
        self._spec, self._source = spec, source
        self._rules_in = cache(partial(_rules, spec, field))
        kind = source.field(name, where=f"prompt.{field}").type
        self.holds_lists = is_list(kind) and not isinstance(spec, PdfSpec)
        if not _holds_files(kind.value_type if self.holds_lists else kind):
            raise InputError(
                f"prompt.{field}: column {name!r} must hold bytes, structs {{bytes, path}}, paths or URLs "
                f"(got {type_name(kind)})"
            )

    def files(self, row: int, value: Any, pages: Any = None) -> list[PromptFile]:
        """Return the files of a value in the row with this ordinal; raises RowRefusedError.

        `pages` are the pages of a PDF document, if they come from a column.
        """
        folder = self._spec.folder
        if folder is None:
            folder = self._source.directory_of(row)
        rules = self._rules_in(folder)
        label = f"column {self.name!r}"
        if not self.holds_lists or value is None:
            return [self._file(value, label, self._pages(pages), rules)]
        items = enumerate(value, start=1)
        return [self._file(item, f"{label}, item {number}", "", rules) for number, item in items]

    def _file(self, value: Any, label: str, pages: str, rules: MediaRules) -> PromptFile:
        if isinstance(value, Mapping):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if value is None:
            raise RowRefusedError(f"{rules.field}: {label} is null")
        content, place = b"", ""
        if not isinstance(value, str):
            content = bytes(value)
        elif value[:5].lower() == "data:":
            content = _content_of_url(value, f"{rules.field}: {label}")
        else:
            place = value
            shown = place if len(place) <= _LONGEST_NAME else f"{place[:_LONGEST_NAME]}…"
            label += f" ({shown})"
        if not content and not place:
            raise RowRefusedError(f"{rules.field}: {label} is empty")
        key = blake2b(content or f"{rules.folder}\0{place}".encode("utf-8", "surrogatepass"), digest_size=16)
        key.update(pages.encode())
        return PromptFile(
            key=key.digest(),
            tokens=USUAL_TOKENS,
            label=label,
            content=content,
            place=place,
            pages=pages,
            rules=rules,
        )

    def _pages(self, of_row: Any) -> str:
        """Return the pages of a document as a text; empty for other files."""
        if not isinstance(self._spec, PdfSpec):
            return ""
        pages = self._spec.pages if self._spec.page_column is None else of_row
        if isinstance(pages, float) and pages.is_integer():
            pages = int(pages)  # pandas turns a column of whole numbers with a null into floats
        try:
            page_ranges(str(pages))
        except ValueError as failure:
            raise RowRefusedError(f"prompt.pdf: {failure}") from None
        return str(pages)


def _rules(spec: MediaSpec | PdfSpec, field: str, folder: str | None) -> MediaRules:
    """Return the rules for the files of this field.

    `folder` is the directory of relative paths; None, as for rows of a program, is the current directory.
    With `/`, files may lie anywhere, and relative paths begin in the current directory.
    """
    is_confined = folder is None or Path(folder) != Path("/")
    return MediaRules(
        folder=str(Path(folder or "").absolute() if is_confined else Path.cwd()),
        confined=is_confined,
        allow_urls=spec.allow_urls,
        max_pixels=spec.max_pixels if isinstance(spec, (ImagesSpec, PdfSpec)) else None,
        dpi=spec.dpi if isinstance(spec, PdfSpec) else None,
        kind=KIND_OF_FIELD[field].name,
    )


def _content_of_url(url: str, where: str) -> bytes:
    """Return the bytes of a data URL; raises RowRefusedError."""
    try:
        with urlopen(url) as reply:  # noqa: S310 - a data URL
            return bytes(reply.read())
    except (ValueError, OSError):
        raise RowRefusedError(f"{where}: cannot be read as a data URL") from None


def _holds_files(kind: pa.DataType) -> bool:
    if pt.is_struct(kind):
        types = [field.type for field in kind if field.name in {"bytes", "path"}]
        return bool(types) and all(map(_holds_files, types))
    return is_bytes(kind) or is_text(kind) or pt.is_null(kind)


def _part(file: PromptFile, placed: list[PromptFile]) -> dict[str, Any]:
    """Return the content part for a file, and append the file to `placed`."""
    placed.append(file)
    return {"type": file.kind.name, file.kind.name: len(placed) - 1}


class MediaPrompts:
    """Renders the prompts of rows with files."""

    def __init__(
        self,
        prompt: PromptSpec,
        source: ColumnSource,
        prompt_of: Callable[[dict[str, Any]], Any],
        printed: Collection[str],
    ) -> None:
        """`prompt_of` renders templates, which print the columns `printed`. Raises JobError or InputError."""
        self._prompt_of = prompt_of
        self._printed = printed
        self._is_text = prompt.text is not None
        self._is_column = isinstance(prompt.messages, str)
        self._columns: list[FileColumn] = []
        self._placeholders: dict[str, str] = {}
        for field, spec in prompt.media.items():
            self._columns += [FileColumn(name, field, spec, source) for name in spec.columns]
            if isinstance(spec, PdfSpec):
                continue  # only chats have documents, and chats need no placeholder
            self._placeholders[KIND_OF_FIELD[field].name] = spec.placeholder or ""
            printed_columns = sorted({*spec.columns} & {*printed})
            if self._is_text and printed_columns and not spec.placeholder:
                raise JobError(
                    f"prompt.text: no placeholder is known for the {field} of {printed_columns[0]!r}",
                    hint=f"give {field}.placeholder, the model's own token, or leave the column out",
                )
        self._page_column = None if prompt.pdf is None else prompt.pdf.page_column
        self._secret = secrets.token_hex(8)  # no value of a row can contain it
        self._mark = re.compile(f"\ue000{self._secret}:(\\d+)\ue001")
        self.columns = [column.name for column in self._columns]
        if self._page_column is not None:
            self.columns.append(self._page_column)

    def prompt(self, ordinal: int, row: dict[str, Any]) -> tuple[Any, tuple[PromptFile, ...]]:
        """Return the prompt of a row and its files; raises RowRefusedError."""
        files: list[PromptFile] = []
        unprinted: list[int] = []  # numbers of the files of columns that no template prints
        marked_row = dict(row)
        pages = None if self._page_column is None else row[self._page_column]
        for column in self._columns:
            value = row[column.name]
            is_printed = column.name in self._printed
            if value is None and is_printed:
                continue  # the template decides what it prints for a null
            start = len(files)
            files += column.files(ordinal, value, pages)
            numbers = range(start, len(files))
            marks = Marks(f"\ue000{self._secret}:{number}\ue001" for number in numbers)
            marked_row[column.name] = marks if column.holds_lists else str(marks)
            if not is_printed:
                unprinted += numbers
        prompt = self._prompt_of(marked_row)
        placed: list[PromptFile] = []
        if self._is_column:
            return _conversation(prompt, files, placed), tuple(placed)
        texts = [prompt] if self._is_text else [message["content"] for message in prompt]
        marked_numbers = chain.from_iterable(map(self._mark.findall, texts))
        in_texts = {int(number) for number in marked_numbers}  # also those that a loop prints
        leading = [files[number] for number in unprinted if number not in in_texts]
        if self._is_text:
            parts = [_part(file, placed) for file in leading]
            parts += self._parts_of(prompt, files, placed)
            pieces = [part.get("text") or self._placeholders[part["type"]] for part in parts]
            return "".join(pieces), tuple(placed)
        return self._messages(prompt, files, leading, placed), tuple(placed)

    def _messages(
        self,
        messages: list[dict[str, Any]],
        files: list[PromptFile],
        leading: list[PromptFile],
        placed: list[PromptFile],
    ) -> list[dict[str, Any]]:
        """Put files in place of their marks, and the files `leading` first into the last user message."""
        user_positions = [at for at, message in enumerate(messages) if message["role"] == _USER]
        target = user_positions[-1] if user_positions else 0
        filled = []
        for at, message in enumerate(messages):
            parts = [_part(file, placed) for file in leading] if at == target else []
            parts += self._parts_of(message["content"], files, placed)
            has_files = any(part["type"] != "text" for part in parts)
            filled.append({**message, "content": parts} if has_files else message)
        return filled

    def _parts_of(self, text: str, files: list[PromptFile], placed: list[PromptFile]) -> list[dict[str, Any]]:
        """Return the parts of a text with marks, and append the files that they stand for to `placed`."""
        parts: list[dict[str, Any]] = []
        for at, piece in enumerate(self._mark.split(text)):  # text, number of a file, text, …
            is_number = at % 2 == 1
            if is_number:
                parts.append(_part(files[int(piece)], placed))
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts


def _conversation(
    messages: list[dict[str, Any]], files: Sequence[PromptFile], placed: list[PromptFile]
) -> list[dict[str, Any]]:
    """Put files into a conversation, and append them to `placed`.

    Files replace the conversation's empty parts of their kind, or else its marks (`<image>`) if there is one
    for each file. Otherwise they go before the first user message's text. Raises RowRefusedError if the
    number of empty parts is not the number of files.
    """
    contents = [message.get("content") for message in messages]
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    empty_parts = Counter(map(_kind_of_empty_part, parts))
    user_texts = [message["content"] for message in messages if _is_users_text(message)]
    files_to_place: dict[str, Iterator[PromptFile]] = {}
    marks: list[str] = []
    leading: list[PromptFile] = []
    for name, kind in KINDS.items():
        kind_files = [file for file in files if file.kind.name == name]
        files_to_place[name] = iter(kind_files)
        if empty_parts[name] not in {0, len(kind_files)}:
            raise RowRefusedError(
                f"prompt.{kind.field}: the messages have {empty_parts[name]} parts of type {name}, "
                f"and the row has {len(kind_files)} {kind.field}"
            )
        if not kind_files or empty_parts[name]:
            continue
        marks_in_texts = sum(text.count(kind.mark) for text in user_texts)
        if marks_in_texts == len(kind_files):
            marks.append(kind.mark)
        else:
            leading += kind_files
    for message in messages:
        content: Any = message.get("content")
        if marks and _is_users_text(message):
            content = _with_empty_parts(content, marks)
        if isinstance(content, list):
            message["content"] = _filled(content, files_to_place, placed)
    if leading:
        target = next((message for message in messages if message["role"] == _USER), messages[0])
        content = target.get("content") or []
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        target["content"] = [*(_part(file, placed) for file in leading), *content]
    return messages


def _with_empty_parts(text: str, marks: list[str]) -> str | list[dict[str, Any]]:
    """Return the parts of a text, with an empty part for each mark; a text without marks stays a text."""
    pieces = re.split(f"({'|'.join(marks)})", text)
    if len(pieces) == 1:
        return text
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if piece in marks:
            parts.append({"type": piece[1:-1]})  # <image> stands for a part of type image
        elif piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts


def _filled(
    parts: list[Any], files_to_place: Mapping[str, Iterator[PromptFile]], placed: list[PromptFile]
) -> list[Any]:
    """Return the parts, with the next file of its kind in place of each empty part."""
    filled = []
    for part in parts:
        kind_name = _kind_of_empty_part(part)
        if kind_name is None:
            filled.append(part)
        else:
            filled.append(_part(next(files_to_place[kind_name]), placed))
    return filled


def _kind_of_empty_part(part: Any) -> str | None:
    """Return the kind of file that an empty part (`{"type": "image"}`) stands for; None for other parts."""
    values = [name for name, value in part.items() if name != "type" and value]
    return part["type"] if part["type"] in KINDS and not values else None


def _is_users_text(message: Mapping[str, Any]) -> bool:
    return message["role"] == _USER and isinstance(message.get("content"), str)
