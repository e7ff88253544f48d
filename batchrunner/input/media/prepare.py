"""What the processes of the pool do: read the files of a row, check them, and make what is sent."""

from collections.abc import Iterator

from batchrunner.core.media import PromptFile
from batchrunner.input.media.bad_file import BadFileError
from batchrunner.input.media.containers import sendable
from batchrunner.input.media.estimates import tokens_of_file
from batchrunner.input.media.reading import content_of

MOST_FILES, MOST_SENT_BYTES = 1000, 60 << 20
"""Most files of one row, and the bytes of them as they are sent."""


class _Prepared:
    """The files of a row as they are sent, so far."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple[bytes, ...], int]] = []
        self._count = self._size = 0

    def add(self, file: PromptFile) -> None:
        """Prepare a file, or the pages of a document; raises BadFileError."""
        ready: list[bytes] = []
        for each in _made(file):
            ready.append(each)
            self._count, self._size = self._count + 1, self._size + len(each)
            if self._count > MOST_FILES or self._size > MOST_SENT_BYTES:
                what = file.kind.field if file.kind.field != file.kind.name else "audio files"
                raise BadFileError(
                    f"the row has more than {MOST_FILES} {what} or {MOST_SENT_BYTES >> 20} MiB of them"
                )
        self.found.append((tuple(ready), sum(tokens_of_file(each, file.kind.name) for each in ready)))


def prepare(files: tuple[PromptFile, ...]) -> list[tuple[tuple[bytes, ...], int]] | str:
    """Return for each file of a row the files that are sent and their tokens, or why it cannot be sent."""
    prepared = _Prepared()
    for file in files:
        try:
            prepared.add(file)
        except BadFileError as failure:
            return f"{file.rules.field}: {file.label}: {failure}"
    return prepared.found


def _made(file: PromptFile) -> Iterator[bytes]:
    content, rules = content_of(file), file.rules
    if rules.kind != "image":
        yield sendable(content, rules.kind)
        return
    # Pillow and PDFium are of an extra that audio and videos do without
    from batchrunner.input.media import documents, pictures  # noqa: PLC0415

    if rules.dpi is None:
        yield pictures.sendable(content, rules.max_pixels)
    else:
        yield from documents.page_images(content, file.pages, rules.dpi, rules.max_pixels)
