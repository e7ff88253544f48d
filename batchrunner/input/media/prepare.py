"""Reads and checks the files of a row, and converts images, before they are sent.

This code runs in worker processes, like a job's Python functions, so that a broken file cannot kill the run.
Audio and videos are sent as they are, because the server decodes them.
"""

import io
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchrunner.core.media import BadFileError, KindName, MediaRules, PromptFile
from batchrunner.input.media.download import download

MOST_FILE_BYTES = 256 << 20
"""Maximum size in bytes of a file that is read."""
MOST_FILES, MOST_SENT_BYTES = 1000, 60 << 20
"""Maximum number of files that are sent for one row, and maximum of their total size in bytes."""
PIXELS_PER_TOKEN = 28 * 28
"""Pixels of an image that make one token in the Qwen-VL and InternVL families; other models are close."""
MOST_TOKENS = 16_384
"""Maximum of the estimated tokens of a file. The image processors of models allow fewer tokens."""
FILE_BYTES_PER_TOKEN = {"audio": 640, "video": 500}
"""Bytes of a file that count as one token. They assume 25 tokens and 128 kbit for a second of audio, and 250
tokens and 1 Mbit for a second of video."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def prepare(files: tuple[PromptFile, ...]) -> list[tuple[tuple[bytes, ...], int]] | str:
    """Return for each file of a row the contents to send and their estimated tokens.

    Return the reason in words if the row cannot be sent.
    """
    results: list[tuple[tuple[bytes, ...], int]] = []
    count = size = 0
    for file in files:
        ready: list[bytes] = []
        try:
            for content in _contents(file):
                ready.append(content)
                count, size = count + 1, size + len(content)
                if count > MOST_FILES or size > MOST_SENT_BYTES:
                    most = f"{MOST_FILES} files or {MOST_SENT_BYTES >> 20} MiB of them"
                    return f"{file.rules.field}: the row has more than {most}"
        except BadFileError as failure:
            return f"{file.rules.field}: {file.label}: {failure}"
        results.append((tuple(ready), sum(_tokens_of(content, file.kind.name) for content in ready)))
    return results


def _tokens_of(content: bytes, kind: KindName) -> int:
    """Return the estimated tokens of a file as it is sent."""
    if kind in FILE_BYTES_PER_TOKEN:
        tokens = len(content) / FILE_BYTES_PER_TOKEN[kind]
    else:
        from PIL import Image  # noqa: PLC0415 - an extra, and heavy

        with Image.open(io.BytesIO(content)) as image:
            tokens = image.width * image.height / PIXELS_PER_TOKEN
    return max(1, min(MOST_TOKENS, round(tokens)))


def _contents(file: PromptFile) -> Iterator[bytes]:
    """Yield the contents to send for a file: the file, an image that models accept, or the pages of a PDF."""
    content, rules = file.content or _read(file.place, file.rules), file.rules
    if rules.kind != "image":
        yield content
        return
    # an extra installs Pillow and PDFium; audio and videos do not need it
    from batchrunner.input.media.pictures import page_images, sendable  # noqa: PLC0415

    if rules.dpi is None:
        yield sendable(content, rules.max_pixels)
    else:
        yield from page_images(content, file.pages, rules.dpi, rules.max_pixels)


def _read(place: str, rules: MediaRules) -> bytes:
    """Return the bytes at a path in the allowed folder, or at a URL; raises BadFileError."""
    match = _SCHEME.match(place)
    scheme = match[1].lower() if match else "file"
    if scheme in {"http", "https"}:
        if not rules.allow_urls:
            raise BadFileError("is a URL: set allow_urls: true to download it")
        return download(place, MOST_FILE_BYTES)
    if scheme != "file":
        raise BadFileError(f"{scheme}:// is not supported: give a path, or an http(s) URL")
    try:
        path = Path(rules.folder, unquote(urlsplit(place).path) if match else place).resolve()
        if rules.confined and not path.is_relative_to(Path(rules.folder).resolve()):
            raise BadFileError(
                f"leads out of {rules.folder}: name the folder of the files in `folder`, or set it to /"
            )
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe could take forever
            raise BadFileError("is not a file")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise BadFileError(f"has more than {MOST_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as failure:  # for example a null byte, or a circle of links
        raise BadFileError(f"cannot be read: {getattr(failure, 'strerror', None) or failure}") from None
