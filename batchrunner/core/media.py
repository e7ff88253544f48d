"""Media of a prompt: what is known of each file before its request, and how parts of a chat stand for it."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

KindName: TypeAlias = Literal["image", "audio", "video"]


class BadFileError(Exception):
    """An image, audio, a video or a document that cannot be sent; its text says why, after what it is."""


class MediaKind(NamedTuple):
    """A kind of media, and what jobs and SGLang (0.5.23) call it."""

    name: KindName
    """Type of a part that stands for it in chats of Hugging Face, and what it is in words."""
    media_type: str
    """Type in the data URL; SGLang looks at the content only."""
    field: str
    """Field of `prompt` that names its columns."""
    usual_bytes: int
    """Bytes that one is expected to have before its file is read, to bound the memory of those read ahead."""

    @property
    def url_part(self) -> str:
        """Type of a part with its data URL in `/v1/chat/completions`."""
        return f"{self.name}_url"

    @property
    def data_field(self) -> str:
        """Field of `/generate` with the data URLs."""
        return f"{self.name}_data"

    @property
    def mark(self) -> str:
        """What stands for one in texts of LLaVA's form."""
        return f"<{self.name}>"


IMAGE = MediaKind("image", "image/png", "images", 2 << 20)
AUDIO = MediaKind("audio", "audio/wav", "audio", 4 << 20)
VIDEO = MediaKind("video", "video/mp4", "videos", 16 << 20)
KINDS: Mapping[KindName, MediaKind] = {kind.name: kind for kind in (IMAGE, AUDIO, VIDEO)}
PDF_FIELD = "pdf"
"""Field of `prompt` with documents, whose pages are images."""
KIND_OF_FIELD = {**{kind.field: kind for kind in KINDS.values()}, PDF_FIELD: IMAGE}
"""What is sent of the files that a field of `prompt` names, by the field's name."""


class MediaRules(NamedTuple):
    """How the files of a column are read and sent; see `prompt.images`, `audio`, `videos` and `pdf`."""

    folder: str
    """Where relative paths begin."""
    confined: bool
    """Whether paths must stay in the folder."""
    allow_urls: bool
    max_pixels: int | None
    dpi: float | None = None
    """Dots an inch of the pages of a PDF document; None for other files."""
    kind: KindName = "image"
    """What is sent."""

    @property
    def field(self) -> str:
        """Field of the job that names the column."""
        return f"prompt.{KINDS[self.kind].field if self.dpi is None else PDF_FIELD}"


class PromptFile(NamedTuple):
    """A file of a prompt: an image, audio, a video, or a PDF document, whose pages are images."""

    key: bytes
    """Hash of the content, or of what names it: equal files have equal keys."""
    tokens: int
    """Tokens that it is expected to take in the prompt."""
    label: str
    """Where it comes from, in words."""
    content: bytes
    """Bytes of the file; empty where a path or a URL names it, and once the file is ready."""
    place: str
    """Path or URL, or empty."""
    pages: str
    """Pages of a PDF document."""
    rules: MediaRules
    ready: tuple[bytes, ...] | None = None
    """Files that are sent (PNG, WAV, MP4 and such): one, or one for each page; None before they are made."""

    @property
    def kind(self) -> MediaKind:
        """What is sent."""
        return KINDS[self.rules.kind]

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return len(self.content) + sum(map(len, self.ready or ()))

    @property
    def expected_size(self) -> int:
        """Bytes that it will take once it is ready, as far as that is known."""
        return self.size or self.kind.usual_bytes


def file_of_part(part: Any) -> int | None:
    """Return the index of the file that a part of a content stands for; None for any other part."""
    name = part.get("type") if isinstance(part, Mapping) else None
    own = part.get(name) if isinstance(name, str) and name in KINDS else None
    return own if type(own) is int else None


def with_labels(message: Mapping[str, Any], files: Sequence[PromptFile]) -> Mapping[str, Any]:
    """Return a message as a person reads it: parts for files say where these come from."""
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
    """Return ranges of page numbers, counted from 1; raises ValueError, whose text says what is wrong.

    `all` has no end.
    """
    if pages.strip() == "all":
        return [range(1, sys.maxsize)]
    if not _PAGES.fullmatch(pages):
        raise ValueError(f"pages are `all`, a number, or ranges such as 1-3,7 (got {pages!r})")
    found = []
    for part in pages.split(","):
        first, _, last = part.partition("-")
        found.append(range(int(first), int(last or first) + 1))
        if found[-1].start < 1 or not found[-1]:
            raise ValueError(f"pages are counted from 1, and a range goes up (got {part.strip()!r})")
    return found
