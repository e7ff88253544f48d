"""Media of a prompt: properties of each file before it is sent, and the parts of a chat that refer to it."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

KindName: TypeAlias = Literal["image", "audio", "video"]


class BadFileError(Exception):
    """An image, audio, video or document cannot be sent; the text names the file, then the reason."""


class MediaKind(NamedTuple):
    """A kind of media, with its names in jobs and in SGLang (0.5.23)."""

    name: KindName
    """Type of its part in chats of Hugging Face; also its name in messages."""
    media_type: str
    """Media type in the data URL; SGLang reads only the content."""
    field: str
    """Field of `prompt` with the names of its columns."""
    usual_bytes: int
    """Expected size in bytes of a file that is not read yet, used to limit the memory of files read ahead."""

    @property
    def url_part(self) -> str:
        """Type of the part with the data URL in `/v1/chat/completions`."""
        return f"{self.name}_url"

    @property
    def data_field(self) -> str:
        """Field of `/generate` with the data URLs."""
        return f"{self.name}_data"

    @property
    def mark(self) -> str:
        """Placeholder of a file in texts of LLaVA's form."""
        return f"<{self.name}>"


IMAGE = MediaKind("image", "image/png", "images", 2 << 20)
AUDIO = MediaKind("audio", "audio/wav", "audio", 4 << 20)
VIDEO = MediaKind("video", "video/mp4", "videos", 16 << 20)
KINDS: Mapping[KindName, MediaKind] = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}
PDF_FIELD = "pdf"
"""Field of `prompt` with PDF documents, whose pages are sent as images."""
KIND_OF_FIELD = {**{kind.field: kind for kind in KINDS.values()}, PDF_FIELD: IMAGE}
"""Kind of media that is sent for the files of a field of `prompt`, by the field's name."""


class MediaRules(NamedTuple):
    """Rules for the files of a column; see `prompt.images`, `audio`, `videos` and `pdf`."""

    folder: str
    """Directory of relative paths."""
    confined: bool
    """Whether paths must stay in `folder`."""
    allow_urls: bool
    max_pixels: int | None
    dpi: float | None = None
    """Dots per inch of the pages of a PDF document; None for other files."""
    kind: KindName = "image"
    """Kind of media that is sent."""

    @property
    def field(self) -> str:
        """Field of the job with the name of the column."""
        return f"prompt.{KINDS[self.kind].field if self.dpi is None else PDF_FIELD}"


class PromptFile(NamedTuple):
    """A file of a prompt: an image, audio, a video, or a PDF document, whose pages are images."""

    key: bytes
    """Hash of the content, or of the path or URL; equal files have equal keys."""
    tokens: int
    """Estimated prompt tokens of the file."""
    label: str
    """Origin of the file, for messages."""
    content: bytes
    """Bytes of the file; empty for a path or URL, and once the file is ready."""
    place: str
    """Path or URL, or empty."""
    pages: str
    """Pages of a PDF document."""
    rules: MediaRules
    ready: tuple[bytes, ...] | None = None
    """Files to send (PNG, WAV, MP4 and such): one, or one for each page; None before they are ready."""

    @property
    def kind(self) -> MediaKind:
        """Kind of media that is sent."""
        return KINDS[self.rules.kind]

    @property
    def size(self) -> int:
        """Bytes of the file in memory."""
        return len(self.content) + sum(map(len, self.ready or ()))

    @property
    def expected_size(self) -> int:
        """Bytes in memory once it is ready; an estimate before."""
        return self.size or self.kind.usual_bytes


def file_of_part(part: Any) -> int | None:
    """Return the index of the file that a part of a message refers to; None for any other part."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    index = part.get(kind) if isinstance(kind, str) and kind in KINDS else None
    return index if type(index) is int else None


def with_labels(message: Mapping[str, Any], files: Sequence[PromptFile]) -> Mapping[str, Any]:
    """Return a message for a person, with the label of each file in place of its index."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    indices = [file_of_part(part) for part in content]
    parts = [
        part if index is None else {**part, part["type"]: files[index].label}
        for part, index in zip(content, indices, strict=True)
    ]
    return {**message, "content": parts}


_PAGES = re.compile(r"\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*")


def page_ranges(pages: str) -> list[range]:
    """Return the ranges of page numbers in a text, counted from 1; `all` is a range without an end.

    Raises ValueError, whose text says what is wrong.
    """
    if pages.strip() == "all":
        return [range(1, sys.maxsize)]
    if not _PAGES.fullmatch(pages):
        raise ValueError(f"pages are `all`, a number, or ranges such as 1-3,7 (got {pages!r})")
    ranges = []
    for part in pages.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if numbers.start < 1 or not numbers:
            raise ValueError(f"pages are counted from 1, and a range goes up (got {part.strip()!r})")
        ranges.append(numbers)
    return ranges
