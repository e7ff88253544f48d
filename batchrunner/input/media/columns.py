"""Values of columns → files of prompts: what each names, its hash, and about how many tokens it takes."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pyarrow as pa
import pyarrow.types as pt

from batchrunner.core.errors import InputError, RowRefusedError
from batchrunner.core.media import KIND_OF_FIELD, MediaRules, PromptFile, page_ranges
from batchrunner.input.dataset import ColumnSource
from batchrunner.input.media.estimates import tokens_of, tokens_of_file
from batchrunner.input.prompt_types import is_bytes, is_list, is_text
from batchrunner.job.prompt import ImagesSpec, MediaSpec, PdfSpec

PAGE_INCHES = 8.5 * 11
_USUAL_PAGES, _MOST_PAGES = 8, 64
"""Pages that a document is expected to have, and the most whose tokens are counted before it is opened."""
_LONGEST_NAME = 120
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FIELDS = {"bytes", "path"}
_WANTED = "hold bytes, a struct {bytes, path}, paths or URLs"


class FileColumn:
    """A column with images, audio, videos or PDF documents."""

    def __init__(self, name: str, spec: MediaSpec | PdfSpec, source: ColumnSource, field: str) -> None:
        """Check the type of the column, which this field of the prompt names; raises InputError."""
        self.name = name
        self.field = field
        self._spec = spec
        self._source = source
        self._where = f"prompt.{field}"
        self._rules: dict[str | None, MediaRules] = {}
        kind = source.field(name, where=self._where).type
        in_list = is_list(kind) and not isinstance(spec, PdfSpec)
        if not _holds_files(kind.value_type if in_list else kind):
            more = "" if isinstance(spec, PdfSpec) else ", or lists of these"
            raise InputError(f"{self._where}: column {name!r} must {_WANTED}{more} (got {kind})")
        self.holds_lists = in_list

    def files(self, row: int, value: Any, pages: Any = None) -> list[PromptFile]:
        """Return the files of a value of the row with this ordinal; raises RowRefusedError.

        `pages` are those of a PDF document.
        """
        if value is None:
            raise RowRefusedError(f"{self._where}: column {self.name!r} is null")
        rules = self._rules_of(row)
        text = self._pages(pages) if isinstance(self._spec, PdfSpec) else ""
        if not self.holds_lists:
            return [self._file(value, f"column {self.name!r}", text, rules)]
        return [
            self._file(item, f"column {self.name!r}, item {number}", text, rules)
            for number, item in enumerate(value, 1)
        ]

    def _file(self, value: Any, label: str, pages: str, rules: MediaRules) -> PromptFile:
        content, place = b"", ""
        if isinstance(value, Mapping):
            inner = value.get("bytes")
            value = value.get("path") if inner is None else inner
        if value is None:
            raise RowRefusedError(f"{self._where}: {label} is null")
        if isinstance(value, str):
            content, place = self._named(value, label)
        else:
            content = bytes(value)
        if not content and not place:
            raise RowRefusedError(f"{self._where}: {label} is empty")
        if place:
            label = f"{label} ({place if len(place) <= _LONGEST_NAME else f'{place[:_LONGEST_NAME]}…'})"
        key = blake2b(content or f"{rules.folder}\0{place}".encode("utf-8", "surrogatepass"), digest_size=16)
        key.update(pages.encode())
        tokens = self._tokens(content, pages, rules)
        return PromptFile(key.digest(), tokens, label, content, place, pages, rules)

    def _named(self, text: str, label: str) -> tuple[bytes, str]:
        """Return the bytes of a data URL, or the path or URL."""
        if text[:5].lower() == "data:":
            head, _, data = text.partition(",")
            try:
                if head.lower().endswith(";base64"):
                    return binascii.a2b_base64(unquote_to_bytes(data)), ""
                return unquote_to_bytes(data), ""
            except ValueError:
                raise RowRefusedError(f"{self._where}: {label}: no data URL that can be read") from None
        if _SCHEME.match(text) and not text.lower().startswith(("http://", "https://", "file://")):
            raise RowRefusedError(
                f"{self._where}: {label}: {_SCHEME.match(text)[0]} is not known here: "  # type: ignore[index]
                "give a path, or an http(s) URL"
            )
        if text[:4].lower() == "http" and _SCHEME.match(text) and not self._spec.allow_urls:
            raise RowRefusedError(f"{self._where}: {label}: is a URL: set allow_urls: true to download it")
        return b"", text

    def _pages(self, given: Any) -> str:
        """Return the pages of a document as a text."""
        assert isinstance(self._spec, PdfSpec)
        pages = self._spec.pages if self._spec.page_column is None else given
        if pages is None:
            raise RowRefusedError(f"prompt.pdf: column {self._spec.page_column!r} is null")
        if isinstance(pages, float) and pages.is_integer():
            pages = int(pages)  # pandas turns a column of whole numbers with a null into floats
        text = str(pages).strip()
        if text != "all":
            try:
                page_ranges(text)
            except ValueError as failure:
                raise RowRefusedError(f"prompt.pdf: {failure}") from None
        return text

    def _tokens(self, content: bytes, pages: str, rules: MediaRules) -> int:
        """Return about how many tokens a file takes, or the pages of a document together."""
        most = rules.max_pixels
        if isinstance(self._spec, PdfSpec):
            count = _USUAL_PAGES if pages == "all" else sum(map(len, page_ranges(pages)))
            one = tokens_of(PAGE_INCHES * self._spec.dpi**2, most)
            return min(count, _MOST_PAGES) * one
        return tokens_of_file(content, rules.kind, most)

    def _rules_of(self, row: int) -> MediaRules:
        given = self._spec.folder
        own = self._source.directory_of(row) if given is None else None
        if own not in self._rules:
            self._rules[own] = rules_of(self._spec, own, self.field)
        return self._rules[own]


def rules_of(spec: MediaSpec | PdfSpec, directory: str | None, field: str) -> MediaRules:
    """Return how files of this field are read whose row is in an input file of a directory, or in none."""
    folder = directory if spec.folder is None else spec.folder
    everywhere = folder is not None and Path(folder) == Path("/")
    return MediaRules(
        folder=str(Path.cwd() if folder is None or everywhere else Path(folder).absolute()),
        confined=not everywhere,
        allow_urls=spec.allow_urls,
        max_pixels=spec.max_pixels if isinstance(spec, (ImagesSpec, PdfSpec)) else None,
        dpi=spec.dpi if isinstance(spec, PdfSpec) else None,
        kind=KIND_OF_FIELD[field].name,
    )


def _holds_files(kind: pa.DataType) -> bool:
    if pt.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        known = _FIELDS & fields.keys()
        return bool(known) and all(pt.is_null(fields[n]) or _is_plain(fields[n]) for n in known)
    return _is_plain(kind) or pt.is_null(kind)


def _is_plain(kind: pa.DataType) -> bool:
    return is_bytes(kind) or is_text(kind)
