"""Reads the requests of a batch file (OpenAI's format), and finds repeated custom_ids.

`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Annotated, Literal

import msgspec
from pyroaring import BitMap
from xxhash import xxh3_64_intdigest

from batchrunner.core.errors import InputError
from batchrunner.core.types import BATCH_PATHS, EMBEDDINGS_PATH
from batchrunner.input.request_bodies import BODY, CUSTOM_ID, URL
from batchrunner.input.text_lines import ITEMS_NAMED, TOO_LONG, LineNumbers, TextRecord

log = logging.getLogger(__name__)

MOST_REPEATED = 100_000
"""Maximum number of custom_ids that are kept because they may be repeated.

They are the custom_ids whose digest has the same low half as an earlier digest. Among ten million different
custom_ids, about 12,000 have one by chance.
"""
ID_CHARACTERS = 40
"""Maximum number of characters of a repeated `custom_id` in a message."""
_LOW_BITS = (1 << 32) - 1
"""Mask for the low half of a digest of 64 bits."""


class _AnyCustomId(msgspec.Struct):
    """The `custom_id` of a line that need not be a valid request."""

    custom_id: msgspec.Raw


class _RequestLine(msgspec.Struct):
    """Valid request on a line of a batch file."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _ModelOfBody(msgspec.Struct):
    """Model that the body of a request names."""

    model: str | None = None


_read_custom_id = msgspec.json.Decoder(_AnyCustomId)
_read_request = msgspec.json.Decoder(_RequestLine)
_read_model = msgspec.json.Decoder(_ModelOfBody)


class _WrongEndpointError(ValueError):
    """Error for a request to an endpoint that is not served, or for another task than earlier requests."""


def request_lines(lines: Iterable[bytes | None], path: str) -> Iterator[TextRecord]:
    """Yield a record for each line that is not empty; None in `lines` stands for a line that is too long.

    The first request decides for the whole file whether its endpoint is that of embeddings. The first request
    with a model decides the model of the whole file. After the last line, raises InputError, which begins
    with `path`, if any line has a wrong endpoint.
    """
    for_embeddings: bool | None = None
    model: str | None = None
    wrong_endpoints = LineNumbers()
    for number, line in enumerate(lines, 1):
        if line is None:
            yield TextRecord(number, values={}, problem=f"not a request: the line {TOO_LONG}", size=0)
            continue
        text = line.strip()
        if not text:
            continue
        values: dict[str, str] = {}
        problem: str | None = None
        try:
            request = _request_in(text)
            _check_endpoint(request.url, for_embeddings=for_embeddings)
            for_embeddings = request.url == EMBEDDINGS_PATH
            model = _same_model(request.body, model)
            values = {CUSTOM_ID: request.custom_id, URL: request.url, BODY: bytes(request.body).decode()}
        except _WrongEndpointError as failure:
            problem = str(failure)
            wrong_endpoints.add(number, problem)
        except (ValueError, RecursionError) as failure:  # errors of msgspec and of UTF-8 are ValueErrors
            values, problem = _custom_id_in(text), f"not a request: {failure}"
        yield TextRecord(number, values, problem, len(line))
    if wrong_endpoints.count:
        raise InputError(
            f"{path}: {wrong_endpoints}: {wrong_endpoints.reason}",
            hint="remove these lines, or move them to a separate file",
        )


def _request_in(text: bytes) -> _RequestLine:
    """Return the request on a line; raise ValueError or RecursionError if it is not a valid request."""
    text.decode()  # refuses bytes that are not UTF-8, which msgspec accepts in a raw body
    return _read_request.decode(text)


def _check_endpoint(url: str, *, for_embeddings: bool | None) -> None:
    """Raise _WrongEndpointError if an endpoint is not served, or is for another task than earlier lines.

    `for_embeddings` tells whether earlier lines ask for embeddings; None for the first request.
    """
    if url not in BATCH_PATHS:
        raise _WrongEndpointError(f"url should be {' or '.join(BATCH_PATHS)} (got {url!r:.60})")
    if for_embeddings not in {None, url == EMBEDDINGS_PATH}:
        raise _WrongEndpointError(
            f"url is {url}, but earlier lines have another task: one model cannot both embed and generate"
        )


def _same_model(body: msgspec.Raw, model: str | None) -> str | None:
    """Return the model of a batch file after a line with this `body`.

    `model` is the model of the lines before; None if they name none. Raises ValueError if the body names
    another model.
    """
    body_model = _read_model.decode(body).model
    if None not in {body_model, model} and body_model != model:
        raise ValueError(
            f"the request names the model {body_model!r}, but an earlier line names {model!r}: "
            "split the file by model"
        )
    return model or body_model


def _custom_id_in(text: bytes) -> dict[str, str]:
    """Return the column `custom_id` of a line that is not a valid request; {} if the line has no custom_id.

    A custom_id that is not a string is returned as its JSON text.
    """
    try:
        custom_id = bytes(_read_custom_id.decode(text).custom_id)
        value = msgspec.json.decode(custom_id) if custom_id.startswith(b'"') else custom_id.decode()
    except (ValueError, RecursionError):
        return {}
    return {} if custom_id == b"null" else {CUSTOM_ID: value}


def log_faults(records: Iterable[TextRecord], path: str) -> Iterator[TextRecord]:
    """Yield the records of a batch file; at the end of the file, log bad lines and repeated custom_ids."""
    bad_lines, custom_ids = LineNumbers(), _CustomIds()
    for record in records:
        if record.problem is not None:
            bad_lines.add(record.line, record.problem)
        if CUSTOM_ID in record.values:
            custom_ids.add(record.line, record.values[CUSTOM_ID])
        yield record
    if bad_lines.count:
        log.warning("%s: %s will fail: %s", path, bad_lines, bad_lines.reason)
    repeated = custom_ids.repeated()
    if repeated:
        shown = "; ".join(f"{name!r} on {lines}" for name, lines in repeated[:ITEMS_NAMED])
        more = f"; and {len(repeated) - ITEMS_NAMED:,} more" if len(repeated) > ITEMS_NAMED else ""
        log.warning("%s: repeated custom_ids (each line is still answered): %s%s", path, shown, more)


class _CustomIds:
    """Custom_ids of a batch file, among which repeated ones are found.

    They take about 10 bytes of memory per line.
    """

    def __init__(self) -> None:
        self._digests = array("Q")
        """Digest of the custom_id on each line, from line 1; 0 for a line without a custom_id."""
        self._low_halves = BitMap()
        """Low halves of the digests so far. A digest with a new low half belongs to a new custom_id."""
        self._candidates: dict[int, str] = {}
        """Custom_ids that may be repeated, by digest."""

    def add(self, line: int, custom_id: str) -> None:
        """Add the custom_id of a line; lines come in order."""
        self._digests.extend(repeat(0, line - 1 - len(self._digests)))
        digest = xxh3_64_intdigest(custom_id.encode())
        self._digests.append(digest)
        low_half = digest & _LOW_BITS
        if low_half not in self._low_halves:
            self._low_halves.add(low_half)
        elif len(self._candidates) < MOST_REPEATED:
            self._candidates.setdefault(digest, custom_id[:ID_CHARACTERS])

    def repeated(self) -> list[tuple[str, LineNumbers]]:
        """Return the first characters of each repeated custom_id, with the lines that have it."""
        # A candidate whose digest occurs once only shares the low half of the digest with another custom_id.
        lines_by_digest: defaultdict[int, LineNumbers] = defaultdict(LineNumbers)
        if self._candidates:
            for line, digest in enumerate(self._digests, 1):
                if digest in self._candidates:
                    lines_by_digest[digest].add(line)
        return [
            (self._candidates[digest], lines) for digest, lines in lines_by_digest.items() if lines.count > 1
        ]
