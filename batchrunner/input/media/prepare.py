"""Reads, checks and converts the media files of a row before they are sent.

This code runs in worker processes, so that a broken file cannot crash the run. Audio and videos are sent
unchanged, because the server decodes them.
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
"""Maximum size in bytes of a file to read."""
MOST_FILES = 1000
"""Maximum number of files sent for one row. Each page of a PDF document counts as a file."""
MOST_SENT_BYTES = 60 << 20
"""Maximum total size in bytes of the files sent for one row."""
PIXELS_PER_TOKEN = 28 * 28
"""Pixels of an image per prompt token in the Qwen-VL and InternVL families; other models are similar."""
MOST_TOKENS = 16_384
"""Upper limit of the estimated tokens of a file. Image processors of models allow fewer tokens."""
FILE_BYTES_PER_TOKEN = {"audio": 640, "video": 500}
"""Estimated bytes of a file per prompt token, by kind of media.

A second of audio is assumed to have 25 tokens and 128 kbit, a second of video 250 tokens and 1 Mbit.
"""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def prepare(files: tuple[PromptFile, ...]) -> list[tuple[tuple[bytes, ...], int]] | str:
    """Read the files of a row; return the contents to send for each file, and its estimated prompt tokens.

    If the row cannot be sent, return the reason as a text.
    """
    results: list[tuple[tuple[bytes, ...], int]] = []
    file_count = total_bytes = 0
    for file in files:
        contents: list[bytes] = []
        try:
            for content in _contents(file):
                contents.append(content)
                file_count += 1
                total_bytes += len(content)
                if file_count > MOST_FILES or total_bytes > MOST_SENT_BYTES:
                    limits = f"{MOST_FILES} files or {MOST_SENT_BYTES >> 20} MiB of files"
                    return f"{file.rules.field}: the row has more than {limits}"
        except BadFileError as failure:
            return f"{file.rules.field}: {file.label}: {failure}"
        tokens = sum(_tokens_of(content, file.kind.name) for content in contents)
        results.append((tuple(contents), tokens))
    return results


def _tokens_of(content: bytes, kind: KindName) -> int:
    """Estimate the prompt tokens of a file from the bytes that are sent."""
    if kind in FILE_BYTES_PER_TOKEN:
        tokens = len(content) / FILE_BYTES_PER_TOKEN[kind]
    else:
        from PIL import Image  # noqa: PLC0415 - an extra, and heavy

        with Image.open(io.BytesIO(content)) as image:
            tokens = image.width * image.height / PIXELS_PER_TOKEN
    return max(1, min(MOST_TOKENS, round(tokens)))


def _contents(file: PromptFile) -> Iterator[bytes]:
    """Yield the contents to send for a file: audio or video, a converted image, or the pages of a PDF."""
    content, rules = file.content or _read(file.place, file.rules), file.rules
    if rules.kind != "image":
        yield content
        return
    # Pillow and PDFium are optional dependencies, and are not needed for audio and videos.
    from batchrunner.input.media.pictures import page_images, sendable  # noqa: PLC0415

    if rules.dpi is None:
        yield sendable(content, rules.max_pixels)
    else:
        yield from page_images(content, file.pages, rules.dpi, rules.max_pixels)


def _read(path_or_url: str, rules: MediaRules) -> bytes:
    """Return the bytes at a path or URL; raise BadFileError if `rules` forbid it or if reading fails."""
    # A value without a scheme is a path. Only in a file:// URL is the path percent-encoded.
    match = _SCHEME.match(path_or_url)
    scheme = match[1].lower() if match else "file"
    if scheme in {"http", "https"}:
        if not rules.allow_urls:
            raise BadFileError("is a URL: set allow_urls: true to download it")
        return download(path_or_url, MOST_FILE_BYTES)
    if scheme != "file":
        raise BadFileError(f"{scheme}:// is not supported: give a path, or an http(s) URL")
    try:
        local_path = unquote(urlsplit(path_or_url).path) if match else path_or_url
        path = Path(rules.folder, local_path).resolve()
        if rules.confined and not path.is_relative_to(Path(rules.folder).resolve()):
            raise BadFileError(
                f"is outside of {rules.folder}: set `folder` to the folder of the files, or to / for any file"
            )
        # Only regular files are read: reading a pipe could block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFileError("is not a regular file")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise BadFileError(f"has more than {MOST_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as failure:
        # Some paths are invalid, such as a path with a null byte or a loop of symbolic links.
        raise BadFileError(f"cannot be read: {getattr(failure, 'strerror', None) or failure}") from None
