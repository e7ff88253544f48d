"""Finds the images, audio, videos and documents in a row's columns, and puts them into the prompt."""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, JobError, RowRefusedError
from batchrunner.core.media import KIND_OF_FIELD, KINDS, MediaRules, PromptFile, page_ranges
from batchrunner.input.dataset import ColumnSource, is_bytes, is_list
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.prompt import ImagesSpec, MediaSpec, PdfSpec, PromptSpec

USUAL_TOKENS = 1024
"""Estimated prompt tokens of a file that has not been opened yet."""
_LONGEST_NAME = 120
"""Maximum length of a path or URL in a message, in characters."""
_USER = "user"


class Marks(list[str]):
    """Placeholder texts for the files of a column in a rendered template; the files replace them later.

    A template can loop over this list, or print it whole.
    """

    def __str__(self) -> str:
        return "".join(self)


class FileColumn:
    """Column with images, audio, videos or PDF documents."""

    def __init__(self, name: str, field: str, spec: MediaSpec | PdfSpec, source: ColumnSource) -> None:
        """Check the type of the column; raise InputError if it cannot hold files.

        `field` is the key below `prompt` that names the column, such as `images`.
        """
        self.name, self.field = name, field
        self._spec, self._source = spec, source
        # Nearly all rows have files of the same folder, so the rules of a folder are made once.
        self._rules_in = cache(partial(_rules, spec, field))
        kind = source.field(name, where=f"prompt.{field}").type
        self.holds_lists = is_list(kind) and not isinstance(spec, PdfSpec)
        """Whether a value of the column is a list of files."""
        if not _holds_files(kind.value_type if self.holds_lists else kind):
            raise InputError(
                f"prompt.{field}: column {name!r} must hold bytes, structs {{bytes, path}}, paths or URLs "
                f"(got {type_name(kind)})"
            )

    def files(self, row: int, value: Any, pages: Any = None) -> list[PromptFile]:
        """Return the media files in one row's value of the column.

        Raises RowRefusedError for an invalid value. `row` is the number of the row in the input. `pages` says
        which pages of PDF documents to send; it is the value of the job's column with pages, if there is one.
        """
        folder = self._spec.folder
        if folder is None:
            # By default, relative paths begin in the folder of the input file that has the row.
            folder = self._source.directory_of(row)
        rules = self._rules_in(folder)
        label = f"column {self.name!r}"
        if not self.holds_lists or value is None:
            # `_file` refuses a null in place of a list, as it refuses a null in place of a file.
            return [self._file(value, label, self._pages(pages), rules)]
        return [
            # Items of a list are images, audio or videos, which have no pages.
            self._file(item, f"{label}, item {number}", pages="", rules=rules)
            for number, item in enumerate(value, start=1)
        ]

    def _file(self, value: Any, label: str, pages: str, rules: MediaRules) -> PromptFile:
        """Return the file whose content or path is `value`; raise RowRefusedError if there is none."""
        if isinstance(value, Mapping):
            # Hugging Face datasets store a file as a struct with `bytes` or a `path`.
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if value is None:
            raise RowRefusedError(f"{rules.field}: {label} is null")
        content, path_or_url = b"", ""
        if not isinstance(value, str):
            content = bytes(value)
        elif value[:5].lower() == "data:":
            content = _content_of_url(value, f"{rules.field}: {label}")
        else:
            path_or_url = value
            is_long = len(path_or_url) > _LONGEST_NAME
            shown = f"{path_or_url[:_LONGEST_NAME]}…" if is_long else path_or_url
            label += f" ({shown})"
        if not content and not path_or_url:
            raise RowRefusedError(f"{rules.field}: {label} is empty")
        # The same relative path in another folder is another file, so the folder is a part of the identity.
        identity = content or f"{rules.folder}\0{path_or_url}".encode("utf-8", "surrogatepass")
        key = blake2b(identity, digest_size=16)
        key.update(pages.encode())
        return PromptFile(
            key=key.digest(),
            tokens=USUAL_TOKENS,
            label=label,
            content=content,
            place=path_or_url,
            pages=pages,
            rules=rules,
        )

    def _pages(self, row_pages: Any) -> str:
        """Return the page numbers of a PDF document to send, such as `1-3,7`; empty for other files.

        `row_pages` is the value of the job's column with page numbers, if there is one.
        """
        if not isinstance(self._spec, PdfSpec):
            return ""
        pages = self._spec.pages if self._spec.page_column is None else row_pages
        if isinstance(pages, float) and pages.is_integer():
            # pandas converts integer columns with nulls to floats.
            pages = int(pages)
        try:
            page_ranges(str(pages))
        except ValueError as failure:
            raise RowRefusedError(f"prompt.pdf: {failure}") from None
        return str(pages)


def _rules(spec: MediaSpec | PdfSpec, field: str, folder: str | None) -> MediaRules:
    """Return the rules for reading the files of `field`, a key below `prompt` such as `images`.

    Paths are relative to `folder`; None means the current directory. If the job allows `/`, files may be
    anywhere on this machine, and paths are relative to the current directory.
    """
    is_confined = folder is None or Path(folder) != Path("/")
    directory = Path.cwd()
    if folder is not None and is_confined:
        directory = Path(folder).absolute()
    return MediaRules(
        folder=str(directory),
        confined=is_confined,
        allow_urls=spec.allow_urls,
        max_pixels=spec.max_pixels if isinstance(spec, (ImagesSpec, PdfSpec)) else None,
        dpi=spec.dpi if isinstance(spec, PdfSpec) else None,
        kind=KIND_OF_FIELD[field].name,
    )


def _content_of_url(url: str, where: str) -> bytes:
    """Return the bytes of a data URL.

    Raises RowRefusedError, whose text begins with `where`, if it is invalid.
    """
    try:
        with urlopen(url) as reply:  # noqa: S310 - a data URL
            return bytes(reply.read())
    except (ValueError, OSError):
        raise RowRefusedError(f"{where}: cannot be read as a data URL") from None


def _holds_files(kind: pa.DataType) -> bool:
    """Tell whether a value of this type can be a file's content or path."""
    if pt.is_struct(kind):
        types = [field.type for field in kind if field.name in {"bytes", "path"}]
        return bool(types) and all(map(_holds_files, types))
    return is_bytes(kind) or is_text(kind) or pt.is_null(kind)


def _part(file: PromptFile, placed: list[PromptFile]) -> dict[str, Any]:
    """Append a file to `placed`, and return a message part with the file's index in that list."""
    placed.append(file)
    return {"type": file.kind.name, file.kind.name: len(placed) - 1}


class _MarkedRow(NamedTuple):
    """A row with placeholder texts (marks) instead of its files, so that a template can print it."""

    values: dict[str, Any]
    files: list[PromptFile]
    """Files of the row. A mark has the index of its file in this list."""
    unprinted: list[int]
    """Indices of the files whose column no template prints."""


class MediaPrompts:
    """Renders prompts with images, audio, videos or PDF documents."""

    def __init__(
        self,
        prompt: PromptSpec,
        source: ColumnSource,
        prompt_of: Callable[[dict[str, Any]], Any],
        printed: Collection[str],
    ) -> None:
        """Check the columns that hold files; raise JobError or InputError.

        `prompt_of` makes the prompt of a row, from templates or from a column of conversations. `printed` are
        the columns that the templates print.
        """
        self._prompt_of = prompt_of
        self._printed = printed
        self._is_text = prompt.text is not None
        """Whether a prompt is a plain text instead of a chat."""
        self._is_column = isinstance(prompt.messages, str)
        """Whether messages come from a column of conversations instead of templates."""
        self._columns: list[FileColumn] = []
        self._placeholders: dict[str, str] = {}
        """Tokens of the model that stand for a file in a plain text prompt, by kind of file."""
        for field, spec in prompt.media.items():
            self._columns += [FileColumn(name, field, spec, source) for name in spec.columns]
            if isinstance(spec, PdfSpec):
                # Documents are only allowed in chats, which need no placeholder tokens.
                continue
            self._placeholders[KIND_OF_FIELD[field].name] = spec.placeholder or ""
            printed_columns = sorted({*spec.columns} & {*printed})
            if self._is_text and printed_columns and not spec.placeholder:
                raise JobError(
                    f"prompt.text: prints the {field} of column {printed_columns[0]!r}, "
                    "but the job gives no placeholder for them",
                    hint=f"set prompt.{field}.placeholder to the token of the model, or leave the column out",
                )
        self._page_column = None if prompt.pdf is None else prompt.pdf.page_column
        # While templates are rendered, each file is replaced by a mark, a short text with the file's index.
        # The mark also has a random secret, so that no value of a row can contain one.
        self._secret = secrets.token_hex(8)
        self._mark = re.compile(f"\ue000{self._secret}:(\\d+)\ue001")
        self.columns = [column.name for column in self._columns]
        """Columns with files or with the page numbers of documents."""
        if self._page_column is not None:
            self.columns.append(self._page_column)

    def prompt(self, ordinal: int, row: dict[str, Any]) -> tuple[Any, tuple[PromptFile, ...]]:
        """Return the prompt of a row, and its files in the order in which the prompt refers to them.

        `ordinal` is the number of the row in the input. Raises RowRefusedError.
        """
        # Each file is replaced by a mark with its index, so that the rendered text shows where the file
        # belongs.
        marked_row = self._marked_row(ordinal, row)
        files = marked_row.files
        prompt = self._prompt_of(marked_row.values)
        # The calls below append each file that they put into the prompt.
        placed: list[PromptFile] = []
        if self._is_column:
            return _conversation(prompt, files, placed), tuple(placed)
        texts = [prompt] if self._is_text else [message["content"] for message in prompt]
        # Files that no template prints are put before the text. A template may also print a file without
        # naming its column, if it loops over all columns. So the marks in the texts are searched.
        printed_files = {int(index) for index in chain.from_iterable(map(self._mark.findall, texts))}
        leading = [files[index] for index in marked_row.unprinted if index not in printed_files]
        if self._is_text:
            parts = [_part(file, placed) for file in leading]
            parts += self._parts_of(prompt, files, placed)
            # In a plain text prompt, the model's placeholder token stands for a file.
            part_texts = [part.get("text") or self._placeholders[part["type"]] for part in parts]
            return "".join(part_texts), tuple(placed)
        return self._messages(prompt, files, leading, placed), tuple(placed)

    def _marked_row(self, ordinal: int, row: dict[str, Any]) -> _MarkedRow:
        """Return a row with a mark (a text with the file's index) in place of each file.

        Raises RowRefusedError if a column does not hold files.
        """
        files: list[PromptFile] = []
        unprinted: list[int] = []
        values = dict(row)
        pages = None if self._page_column is None else row[self._page_column]
        for column in self._columns:
            value = row[column.name]
            is_printed = column.name in self._printed
            if value is None and is_printed:
                # A null stays null, and the template decides how to print it.
                continue
            start = len(files)
            files += column.files(ordinal, value, pages)
            indices = range(start, len(files))
            # U+E000 and U+E001 are in Unicode's private use area, so texts rarely contain them.
            marks = Marks(f"\ue000{self._secret}:{index}\ue001" for index in indices)
            values[column.name] = marks if column.holds_lists else str(marks)
            if not is_printed:
                unprinted += indices
        return _MarkedRow(values=values, files=files, unprinted=unprinted)

    def _messages(
        self,
        messages: list[dict[str, Any]],
        files: list[PromptFile],
        leading: list[PromptFile],
        placed: list[PromptFile],
    ) -> list[dict[str, Any]]:
        """Put files in place of their marks, and `leading` at the start of the last user message.

        A mark has the index of its file in `files`. The files are appended to `placed`, in their order in the
        prompt. A message without files stays unchanged.
        """
        user_messages = [index for index, message in enumerate(messages) if message["role"] == _USER]
        # Without a user message, the files go into the first message.
        target = user_messages[-1] if user_messages else 0
        messages_with_files = []
        for index, message in enumerate(messages):
            parts = [_part(file, placed) for file in leading] if index == target else []
            parts += self._parts_of(message["content"], files, placed)
            has_files = any(part["type"] != "text" for part in parts)
            messages_with_files.append({**message, "content": parts} if has_files else message)
        return messages_with_files

    def _parts_of(self, text: str, files: list[PromptFile], placed: list[PromptFile]) -> list[dict[str, Any]]:
        """Split a text at the marks of files into text parts and media parts.

        Append the files to `placed`.
        """
        parts: list[dict[str, Any]] = []
        # `split` yields texts and indices of files in turn.
        for number, text_or_index in enumerate(self._mark.split(text)):
            is_index = number % 2 == 1
            if is_index:
                parts.append(_part(files[int(text_or_index)], placed))
            elif text_or_index:
                parts.append({"type": "text", "text": text_or_index})
        return parts


def _conversation(
    messages: list[dict[str, Any]], files: Sequence[PromptFile], placed: list[PromptFile]
) -> list[dict[str, Any]]:
    """Put files into a conversation from a column, and append them to `placed`.

    Files replace the empty media parts (`{"type": "image"}`). Without such parts, they replace the marks
    (`<image>`) in user messages, if there is a mark for each file. Otherwise they go to the start of the
    first user message. Raises RowRefusedError if the number of empty parts differs from the number of files.
    """
    contents = [message.get("content") for message in messages]
    parts = chain.from_iterable(content for content in contents if isinstance(content, list))
    empty_parts = Counter(map(_kind_of_empty_part, parts))
    user_texts = [message["content"] for message in messages if _is_users_text(message)]
    files_to_place: dict[str, Iterator[PromptFile]] = {}
    marks: list[str] = []
    leading: list[PromptFile] = []
    # For each kind of file, decide where its files go before any message is changed.
    for name, kind in KINDS.items():
        kind_files = [file for file in files if file.kind.name == name]
        files_to_place[name] = iter(kind_files)
        if empty_parts[name] not in {0, len(kind_files)}:
            raise RowRefusedError(
                f"prompt.{kind.field}: the messages have {empty_parts[name]} parts of type {name}, "
                f"but the row has {len(kind_files)} {kind.field}"
            )
        if not kind_files or empty_parts[name]:
            # There are no files of this kind, or they replace the empty parts.
            continue
        marks_in_texts = sum(text.count(kind.mark) for text in user_texts)
        if marks_in_texts == len(kind_files):
            marks.append(kind.mark)
        else:
            leading += kind_files
    for message in messages:
        content: Any = message.get("content")
        if marks and _is_users_text(message):
            # Marks become empty parts, which `_filled` then replaces by files.
            content = _with_empty_parts(content, marks)
        if isinstance(content, list):
            message["content"] = _filled(content, files_to_place, placed)
    if leading:
        _put_first(messages, leading, placed)
    return messages


def _put_first(messages: list[dict[str, Any]], files: Sequence[PromptFile], placed: list[PromptFile]) -> None:
    """Put files at the start of the first user message; without one, at the start of the first message.

    The files are appended to `placed`, in their order in the prompt.
    """
    target = next((message for message in messages if message["role"] == _USER), messages[0])
    content = target.get("content") or []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    target["content"] = [*(_part(file, placed) for file in files), *content]


def _with_empty_parts(text: str, marks: list[str]) -> str | list[dict[str, Any]]:
    """Split a text at its marks, which become empty media parts; return a text without marks unchanged."""
    texts_and_marks = re.split(f"({'|'.join(marks)})", text)
    if len(texts_and_marks) == 1:
        return text
    parts: list[dict[str, Any]] = []
    for text_or_mark in texts_and_marks:
        if text_or_mark in marks:
            # `<image>` becomes a part of type `image`.
            parts.append({"type": text_or_mark[1:-1]})
        elif text_or_mark.strip():
            parts.append({"type": "text", "text": text_or_mark.strip("\n")})
    return parts


def _filled(
    parts: list[Any], files_to_place: Mapping[str, Iterator[PromptFile]], placed: list[PromptFile]
) -> list[Any]:
    """Return the parts of a message, with each empty part replaced by the next file of its kind.

    The files come from the iterators in `files_to_place`, by kind, and are appended to `placed`.
    """
    parts_with_files = []
    for part in parts:
        kind_name = _kind_of_empty_part(part)
        if kind_name is None:
            parts_with_files.append(part)
        else:
            parts_with_files.append(_part(next(files_to_place[kind_name]), placed))
    return parts_with_files


def _kind_of_empty_part(part: Any) -> str | None:
    """Return the kind of an empty media part, such as `{"type": "image"}`; None for any other part."""
    values = [name for name, value in part.items() if name != "type" and value]
    return part["type"] if part["type"] in KINDS and not values else None


def _is_users_text(message: Mapping[str, Any]) -> bool:
    return message["role"] == _USER and isinstance(message.get("content"), str)
