"""The bytes of a file: from the row, from a path in the allowed folder, or from a URL."""

import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchrunner.core.media import MediaRules, PromptFile
from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.download import download

MOST_FILE_BYTES = 256 << 20
"""Most bytes of a file."""


def content_of(file: PromptFile) -> bytes:
    """Return the bytes of a file; raises BadFileError."""
    if file.content:
        return file.content
    scheme = file.place[:8].lower()
    if scheme.startswith(("http://", "https://")):
        if not file.rules.allow_urls:
            raise BadFileError("is a URL: set allow_urls: true to download it")
        return download(file.place, MOST_FILE_BYTES)
    return _file(file.place, file.rules)


def _file(place: str, rules: MediaRules) -> bytes:
    if place[:7].lower() == "file://":
        place = unquote(urlsplit(place).path)
    try:
        path = Path(rules.folder, place).resolve()
        folder = Path(rules.folder).resolve()
        if rules.confined and not path.is_relative_to(folder):
            raise BadFileError(
                f"leads out of {rules.folder}: name the folder of the files in `folder`, or set it to /"
            )
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever
            raise BadFileError("is no file")
        if found.st_size > MOST_FILE_BYTES:
            raise BadFileError(f"has more than {MOST_FILE_BYTES >> 20} MiB")
        content = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as failure:  # a null byte, links in a circle
        why = getattr(failure, "strerror", None) or str(failure)
        raise BadFileError(f"cannot be read: {why}") from None
    if not content:
        raise BadFileError("is an empty file")
    return content
