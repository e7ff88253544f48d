"""Images, audio and videos of a prompt: properties of the files, and message parts that refer to them."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

KindName: TypeAlias = Literal["image", "audio", "video"]


class BadFileError(Exception):
    """An image, audio, video or document cannot be sent. The text names the file, then the reason."""


class MediaKind(NamedTuple):
    """A kind of media (image, audio or video), with its names in jobs and in SGLang (0.5.23)."""

    name: KindName
    """Type of a part of a chat message in Hugging Face's format; also the kind's name in messages."""
    media_type: str
    """Media type in data URLs. SGLang only reads the content, not the media type."""
    field: str
    """Field of the job's `prompt` with the columns that have files of this kind."""
    usual_bytes: int
    """Assumed size in bytes of a file that has not been read yet, to limit the memory for files."""

    @property
    def url_part(self) -> str:
        """Type of a message part with a data URL in `/v1/chat/completions`, such as `image_url`."""
        return f"{self.name}_url"

    @property
    def data_field(self) -> str:
        """Field of `/generate` with the data URLs, such as `image_data`."""
        return f"{self.name}_data"

    @property
    def mark(self) -> str:
        """Placeholder of a file in a text, in LLaVA's format, such as `<image>`."""
        return f"<{self.name}>"


IMAGE = MediaKind("image", "image/png", "images", 2 << 20)
AUDIO = MediaKind("audio", "audio/wav", "audio", 4 << 20)
VIDEO = MediaKind("video", "video/mp4", "videos", 16 << 20)
KINDS: Mapping[KindName, MediaKind] = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}
PDF_FIELD = "pdf"
"""Field of `prompt` with PDF documents, whose pages are sent as images."""
KIND_OF_FIELD = {**{kind.field: kind for kind in KINDS.values()}, PDF_FIELD: IMAGE}
"""Kind of media that is sent to the engine, by field of `prompt`."""


class MediaRules(NamedTuple):
    """Rules for reading the files in a column, from the job's `prompt.images`, `audio`, `videos` or `pdf`."""

    folder: str
    """Directory that relative paths start from."""
    confined: bool
    """Whether all paths must be inside `folder`."""
    allow_urls: bool
    """Whether a value may be a URL, which is then downloaded."""
    max_pixels: int | None
    """Maximum number of pixels of an image; None for no limit. A larger image is scaled down."""
    dpi: float | None = None
    """Resolution of PDF pages in dots per inch; None for other files."""
    kind: KindName = "image"
    """Kind of media that is sent to the engine."""

    @property
    def field(self) -> str:
        """Job field that names the column with these files, such as `prompt.images`."""
        return f"prompt.{KINDS[self.kind].field if self.dpi is None else PDF_FIELD}"


class PromptFile(NamedTuple):
    """A file of a prompt: an image, audio, a video, or a PDF document, whose pages are sent as images."""

    key: bytes
    """Hash of the content, or of the path or URL. Equal files have equal keys."""
    tokens: int
    """Estimated number of prompt tokens of the file."""
    label: str
    """Where the file comes from, in words for messages."""
    content: bytes
    """Bytes of the file, if the input has them and `ready` is not set yet; else empty."""
    place: str
    """Path or URL of the file; empty if the input has its bytes."""
    pages: str
    """Pages of a PDF document to send, such as `1-3,7` or `all`; see `page_ranges`."""
    rules: MediaRules
    """Rules for reading the files of this column."""
    ready: tuple[bytes, ...] | None = None
    """Bytes to send (PNG, WAV, MP4 and such), one entry per file or page; None before the file is read."""

    @property
    def kind(self) -> MediaKind:
        """Kind of media that is sent to the engine."""
        return KINDS[self.rules.kind]

    @property
    def size(self) -> int:
        """Number of bytes that the file takes in memory now."""
        return len(self.content) + sum(map(len, self.ready or ()))

    @property
    def expected_size(self) -> int:
        """Number of bytes that the file will take in memory; an estimate if it has not been read yet."""
        return self.size or self.kind.usual_bytes


def file_of_part(part: Any) -> int | None:
    """Return the index of the file that a message part refers to; None for a part without a file."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    index = part.get(kind) if isinstance(kind, str) and kind in KINDS else None
    # A bool is an `int`, but no index.
    return index if type(index) is int else None


def with_labels(message: Mapping[str, Any], files: Sequence[PromptFile]) -> Mapping[str, Any]:
    """Return a message with the label of each file in place of its index, to show it to a person."""
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
    """Return the ranges of page numbers in a text such as `1-3,7`; `all` is a range without an end.

    Page numbers start at 1. Raises ValueError, which says what is wrong, for any other text.
    """
    if pages.strip() == "all":
        return [range(1, sys.maxsize)]
    if not _PAGES.fullmatch(pages):
        raise ValueError(f"pages must be `all`, a number, or ranges such as 1-3,7 (got {pages!r})")
    ranges = []
    for part in pages.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if numbers.start < 1 or not numbers:
            raise ValueError(f"page numbers start at 1, and a range must not go down (got {part.strip()!r})")
        ranges.append(numbers)
    return ranges
