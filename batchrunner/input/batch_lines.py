"""Reads the requests of a batch file (OpenAI's format).

Each line is a request:
`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}`

The whole file is refused if a custom_id is missing, repeated or not text, or if an endpoint is wrong. Such a
request could not be sent, or its result could not be matched with it. For any other fault, only the request
on that line fails.
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Annotated, Literal, NamedTuple

import msgspec
from pyroaring import BitMap
from xxhash import xxh3_64_intdigest

from batchrunner.core.errors import InputError
from batchrunner.input.request_bodies import BODY, CUSTOM_ID, URL
from batchrunner.input.text_lines import ITEMS_NAMED, TOO_LONG, LineNumbers, TextRecord
from batchrunner.job.prompt import BatchRules
from batchrunner.job.tasks import TASK_OF_ENDPOINT, TaskName

log = logging.getLogger(__name__)

MOST_REPEATED = 100_000
"""Maximum number of custom_ids that are kept as possible repeats.

A custom_id is kept if an earlier one has the same low half of its digest. This test is cheap, but not exact:
of ten million different custom_ids, about 12,000 are kept by chance.
"""
MOST_FAULTS = 50
"""Maximum number of faulty lines that an error lists for each kind of fault."""
ID_CHARACTERS = 40
"""Maximum length in characters of a repeated `custom_id` in a message."""
_LOW_BITS = (1 << 32) - 1
"""Mask for the low half of a 64-bit digest."""


class _AnyCustomId(msgspec.Struct):
    """A line's `custom_id` of any type. The line may otherwise be no valid request."""

    custom_id: msgspec.Raw


class _Named(msgspec.Struct):
    """A request on a line, of which only the `custom_id` is decoded."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]


class _Addressed(msgspec.Struct):
    """A line that is meant as a request, because it has a `url`."""

    url: msgspec.Raw


class _RequestLine(msgspec.Struct):
    """Valid request on a line of a batch file."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _ModelOfBody(msgspec.Struct):
    """The model in a request body."""

    model: str | None = None


_read_name = msgspec.json.Decoder(_Named)
_read_url = msgspec.json.Decoder(_Addressed)
_read_custom_id = msgspec.json.Decoder(_AnyCustomId)
_read_request = msgspec.json.Decoder(_RequestLine)
_read_model = msgspec.json.Decoder(_ModelOfBody)


class LineFault(NamedTuple):
    """A fault on one line for which the whole file is refused."""

    line: int
    code: str
    """OpenAI's name of the fault."""
    problem: str


class BatchFileError(InputError):
    """A batch file is refused because of some of its lines. No request of the file is sent."""

    def __init__(self, message: str, faults: Sequence[LineFault] = (), *, hint: str | None = None) -> None:
        """Create the error; `faults` are the first faulty lines, at most MOST_FAULTS of each kind."""
        super().__init__(message, hint=hint)
        self.line_faults = [*faults]


class _LineFaults:
    """Faults of one file that have the same error code."""

    def __init__(self, code: str, hint: str) -> None:
        self._code, self._hint = code, hint
        self._numbers = LineNumbers()
        self._faults: list[LineFault] = []

    def add(self, line: int, problem: str) -> None:
        self._numbers.add(line, problem)
        if len(self._faults) < MOST_FAULTS:
            self._faults.append(LineFault(line, self._code, problem))

    def errors(self, path: str) -> list[BatchFileError]:
        """Return one error for all these faults, or an empty list if there are none."""
        if not self._numbers.count:
            return []
        message = f"{path}: {self._numbers}: {self._numbers.reason}"
        return [BatchFileError(message, self._faults, hint=self._hint)]


def _raise_together(errors: Sequence[BatchFileError]) -> None:
    """Raise the errors, combined into one whose text has a line for each; do nothing if there are none."""
    if len(errors) > 1:
        faults = sorted(fault for error in errors for fault in error.line_faults)
        # An error with `faults` contributes one text for each fault.
        texts = [text for error in errors for text in (error.faults or [str(error)])]
        combined = BatchFileError("\n".join(texts), faults)
        combined.faults = texts
        raise combined
    # Only zero or one error gets here.
    for error in errors:
        raise error


class _WrongEndpointError(ValueError):
    """A request's endpoint is not served, or belongs to another task than the earlier requests."""


class _WrongCustomIdError(ValueError):
    """A request has no custom_id, or a custom_id that is not text."""


def request_lines(
    lines: Iterable[bytes | None], path: str, endpoint: str | None = None
) -> Iterator[TextRecord]:
    """Yield a record for each request; a None in `lines` is a line that was too long.

    Empty lines are skipped. Each request must name the `endpoint`. If this is None, the first request decides
    the task for the whole file, such as text generation. The first request that names a model decides the
    model. After the last line, raises BatchFileError if any line has a wrong endpoint or no custom_id. The
    error's text begins with `path`.
    """
    task: TaskName | None = None
    model: str | None = None
    wrong_endpoints = _LineFaults("invalid_url", "remove these lines, or move them to a file of their own")
    wrong_ids = _LineFaults("missing_required_parameter", "give each line a custom_id of its own")
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
            task = _same_task(request.url, task, endpoint)
            model = _same_model(request.body, model)
            values = {CUSTOM_ID: request.custom_id, URL: request.url, BODY: bytes(request.body).decode()}
        except _WrongEndpointError as failure:
            problem = str(failure)
            wrong_endpoints.add(number, problem)
        except _WrongCustomIdError as failure:
            problem = str(failure)
            wrong_ids.add(number, problem)
        # msgspec and UTF-8 decoding both raise subclasses of ValueError.
        except (ValueError, RecursionError) as failure:
            values, problem = _custom_id_in(text), f"not a request: {failure}"
        yield TextRecord(number, values, problem, len(line))
    _raise_together([*wrong_ids.errors(path), *wrong_endpoints.errors(path)])


def _request_in(text: bytes) -> _RequestLine:
    """Return the request on a line; raises ValueError or RecursionError if there is none.

    The error is a _WrongCustomIdError if the line has a `url`, but no usable custom_id.
    """
    # This raises if the text is not UTF-8. msgspec does not check the bytes of a raw body.
    text.decode()
    try:
        return _read_request.decode(text)
    except msgspec.ValidationError:
        # If the custom_id is the fault, raise the error that says so.
        _check_custom_id(text)
        raise


def _check_custom_id(text: bytes) -> None:
    """Raise _WrongCustomIdError if a request has no custom_id, or one that is not text.

    An object without a `url` passes, because it is not a request. The user may have passed a data file
    instead of a batch file.
    """
    try:
        _read_url.decode(text)
    except msgspec.ValidationError:
        return
    try:
        _read_name.decode(text)
    except msgspec.ValidationError as failure:
        raise _WrongCustomIdError(f"custom_id should be a text that is not empty ({failure})") from None


def _same_task(url: str, task: TaskName | None, endpoint: str | None) -> TaskName:
    """Return the task that a request's endpoint serves, such as text generation.

    Raises _WrongEndpointError if the request's endpoint is not `endpoint` (None allows all) or is not served,
    or if `task`, the task of earlier lines, differs.
    """
    if endpoint not in {None, url}:
        raise _WrongEndpointError(f"its url is not the batch's {endpoint} (got {url!r:.60})")
    task_of_url = TASK_OF_ENDPOINT.get(url)
    if task_of_url is None:
        raise _WrongEndpointError(f"url should be {' or '.join(TASK_OF_ENDPOINT)} (got {url!r:.60})")
    if task not in {None, task_of_url}:
        raise _WrongEndpointError(
            f"url is {url}, which needs a model for task: {task_of_url}; an earlier line needs one for "
            f"task: {task}"
        )
    return task_of_url


def _same_model(body: msgspec.Raw, model: str | None) -> str | None:
    """Return the model for the whole file, after a line with this body. None if no line has named one yet.

    `model` is the model that earlier lines name. Raises ValueError if the body names another.
    """
    body_model = _read_model.decode(body).model
    both_name_a_model = body_model is not None and model is not None
    if both_name_a_model and body_model != model:
        raise ValueError(
            f"the request names the model {body_model!r}, but an earlier line names {model!r}: "
            "split the file by model"
        )
    return model or body_model


def _custom_id_in(text: bytes) -> dict[str, str]:
    """Return the custom_id of an invalid request as `{"custom_id": …}`; {} if the line has none.

    A custom_id that is not a string is returned as JSON text.
    """
    try:
        custom_id = bytes(_read_custom_id.decode(text).custom_id)
        # `custom_id` is raw JSON. Only a string is decoded.
        is_string = custom_id.startswith(b'"')
        value = msgspec.json.decode(custom_id) if is_string else custom_id.decode()
    except (ValueError, RecursionError):
        return {}
    return {} if custom_id == b"null" else {CUSTOM_ID: value}


def checked_requests(records: Iterable[TextRecord], path: str, rules: BatchRules) -> Iterator[TextRecord]:
    """Yield the records of a batch file; at its end, log the faulty lines and check for repeated custom_ids.

    Raises BatchFileError after the last record if any line is unusable, or if custom_ids are repeated
    although `rules` forbid it.
    """
    bad_lines, custom_ids = LineNumbers(), _CustomIds()
    errors: list[BatchFileError] = []
    try:
        for record in records:
            if record.problem is not None:
                bad_lines.add(record.line, record.problem)
            if CUSTOM_ID in record.values:
                custom_ids.add(record.line, record.values[CUSTOM_ID])
            yield record
    except BatchFileError as failure:
        # Raised below, together with the error about repeated custom_ids.
        errors.append(failure)
    if not rules.allows_repeated:
        errors += custom_ids.errors(path)
    _raise_together(errors)
    if bad_lines.count:
        log.warning("%s: %s will fail: %s", path, bad_lines, bad_lines.reason)


class _CustomIds:
    """Finds repeated custom_ids in a batch file. It takes about 10 bytes of memory per line."""

    def __init__(self) -> None:
        self._digests = array("Q")
        """Digests of the custom_ids, one for each line; 0 for a line without a custom_id."""
        self._low_halves = BitMap()
        """Low halves of all digests so far. A digest whose low half is new belongs to a new custom_id."""
        self._candidates: dict[int, str] = {}
        """Custom_ids that may be repeats, by digest."""

    def add(self, line: int, custom_id: str) -> None:
        """Add the custom_id of a line; lines come in order.

        The bitmap of low halves takes little memory. A custom_id whose low half is not in the bitmap is new.
        Any other one may be a repeat and is kept as a candidate, until `repeated` compares the whole digests.
        """
        # Lines without a custom_id get the digest 0.
        self._digests.extend(repeat(0, line - 1 - len(self._digests)))
        digest = xxh3_64_intdigest(custom_id.encode())
        self._digests.append(digest)
        low_half = digest & _LOW_BITS
        if low_half not in self._low_halves:
            self._low_halves.add(low_half)
        elif len(self._candidates) < MOST_REPEATED:
            self._candidates.setdefault(digest, custom_id[:ID_CHARACTERS])

    def errors(self, path: str) -> list[BatchFileError]:
        """Return one error for all repeated custom_ids, or an empty list if there are none.

        The error's text begins with `path`.
        """
        repeated = self.repeated()
        if not repeated:
            return []
        # As text, `lines` is a list of line numbers, such as `lines 2, 7`.
        shown = "; ".join(f"{name!r} on {lines}" for name, lines in repeated[:ITEMS_NAMED])
        more = f"; and {len(repeated) - ITEMS_NAMED:,} more" if len(repeated) > ITEMS_NAMED else ""
        # The first line with the custom_id is valid. Only the later ones are faults.
        faults = [
            LineFault(line, "duplicate_custom_id", f"custom_id {name!r} is also on line {lines.first[0]}")
            for name, lines in repeated
            for line in lines.first[1:]
        ]
        message = f"{path}: repeated custom_ids: {shown}{more}"
        hint = "give each line a custom_id of its own, or add --allow-repeated"
        return [BatchFileError(message, faults[:MOST_FAULTS], hint=hint)]

    def repeated(self) -> list[tuple[str, LineNumbers]]:
        """Return each repeated custom_id, shortened, with the numbers of its lines."""
        # A candidate that occurs once is no repeat. Only half of its digest equals that of another custom_id.
        lines_by_digest: defaultdict[int, LineNumbers] = defaultdict(LineNumbers)
        if self._candidates:
            for line, digest in enumerate(self._digests, 1):
                if digest in self._candidates:
                    lines_by_digest[digest].add(line)
        return [
            (self._candidates[digest], lines) for digest, lines in lines_by_digest.items() if lines.count > 1
        ]
