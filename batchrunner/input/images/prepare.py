"""What the processes of the pool do: read the files of a row's images, check them, and make what is sent."""

from collections.abc import Iterator

from batchrunner.core.images import PromptImage
from batchrunner.input.images.bad_image import BadImageError
from batchrunner.input.images.documents import page_images
from batchrunner.input.images.estimates import tokens_of_file
from batchrunner.input.images.pictures import sendable
from batchrunner.input.images.reading import content_of

MOST_IMAGES, MOST_SENT_BYTES = 1000, 60 << 20
"""Most images of one row, and the bytes of them as they are sent."""


class _Prepared:
    """The images of a row as they are sent, so far."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple[bytes, ...], int]] = []
        self._count = self._size = 0

    def add(self, image: PromptImage) -> None:
        """Prepare an image, or the pages of a document; raises BadImageError."""
        ready: list[bytes] = []
        for each in _made(image):
            ready.append(each)
            self._count, self._size = self._count + 1, self._size + len(each)
            if self._count > MOST_IMAGES or self._size > MOST_SENT_BYTES:
                raise BadImageError(
                    f"the row has more than {MOST_IMAGES} images or {MOST_SENT_BYTES >> 20} MiB of them"
                )
        self.found.append((tuple(ready), sum(map(tokens_of_file, ready))))


def prepare(images: tuple[PromptImage, ...]) -> list[tuple[tuple[bytes, ...], int]] | str:
    """Return for each image of a row the files that are sent and their tokens, or why it cannot be sent."""
    prepared = _Prepared()
    for image in images:
        try:
            prepared.add(image)
        except BadImageError as failure:
            where = "prompt.images" if image.rules.dpi is None else "prompt.pdf"
            return f"{where}: {image.label}: {failure}"
    return prepared.found


def _made(image: PromptImage) -> Iterator[bytes]:
    content = content_of(image)
    if image.rules.dpi is None:
        yield sendable(content, image.rules.max_pixels)
    else:
        yield from page_images(content, image.pages, image.rules.dpi, image.rules.max_pixels)
