"""Images of a prompt: what is known of each between its row and the request, and how parts stand for them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ImageRules(NamedTuple):
    """How the images of a job are read and sent; see `prompt.images` and `prompt.pdf`."""

    folder: str
    """Where relative paths begin."""
    confined: bool
    """Whether paths must stay in the folder."""
    allow_urls: bool
    max_pixels: int | None
    dpi: float | None = None
    """Dots an inch of the pages of a PDF document; None for images."""


class PromptImage(NamedTuple):
    """An image of a prompt, or the pages of a PDF document."""

    key: bytes
    """Hash of the content, or of what names it: equal images have equal keys."""
    tokens: int
    """Tokens that it is expected to take in the prompt."""
    label: str
    """Where it comes from, in words."""
    content: bytes
    """Bytes of the file; empty where a path or a URL names it, and once the image is ready."""
    place: str
    """Path or URL, or empty."""
    pages: str
    """Pages of a PDF document."""
    rules: ImageRules
    ready: tuple[bytes, ...] | None = None
    """Files that are sent (PNG, JPEG and such): one, or one for each page; None before they are made."""

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        return len(self.content) + sum(map(len, self.ready or ()))


def image_of_part(part: Any) -> int | None:
    """Return the index of the image that a part of a content stands for; None for any other part."""
    own = part.get("image") if isinstance(part, Mapping) and part.get("type") == "image" else None
    return own if type(own) is int else None


def with_labels(message: Mapping[str, Any], images: Sequence[PromptImage]) -> Mapping[str, Any]:
    """Return a message as a person reads it: parts for images say where these come from."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    indices = [image_of_part(part) for part in content]
    parts = [
        part if index is None else {**part, "image": images[index].label}
        for part, index in zip(content, indices, strict=True)
    ]
    return {**message, "content": parts}
