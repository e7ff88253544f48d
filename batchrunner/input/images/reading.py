"""The bytes of an image's file: from the row, from a path in the allowed folder, or from a URL."""

import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchrunner.core.images import ImageRules, PromptImage
from batchrunner.input.images.bad_image import BadImageError
from batchrunner.input.images.download import download

MOST_FILE_BYTES = 256 << 20
"""Most bytes of a file."""


def content_of(image: PromptImage) -> bytes:
    """Return the bytes of an image's file; raises BadImageError."""
    if image.content:
        return image.content
    scheme = image.place[:8].lower()
    if scheme.startswith(("http://", "https://")):
        if not image.rules.allow_urls:
            raise BadImageError("is a URL: set allow_urls: true to download it")
        return download(image.place, MOST_FILE_BYTES)
    return _file(image.place, image.rules)


def _file(place: str, rules: ImageRules) -> bytes:
    if place[:7].lower() == "file://":
        place = unquote(urlsplit(place).path)
    try:
        path = Path(rules.folder, place).resolve()
        folder = Path(rules.folder).resolve()
        if rules.confined and not path.is_relative_to(folder):
            raise BadImageError(
                f"leads out of {rules.folder}: name the folder of the files in `folder`, or set it to /"
            )
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever
            raise BadImageError("is no file")
        if found.st_size > MOST_FILE_BYTES:
            raise BadImageError(f"has more than {MOST_FILE_BYTES >> 20} MiB")
        content = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as failure:  # a null byte, links in a circle
        why = getattr(failure, "strerror", None) or str(failure)
        raise BadImageError(f"cannot be read: {why}") from None
    if not content:
        raise BadImageError("is an empty file")
    return content
