"""Requests to an object store with obstore: conditional writes, repeated reads, and causes of failures."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from tenacity import Retrying

from batchrunner.core.errors import JobError, StoreRequestError, first_line
from batchrunner.core.retry import backoff
from batchrunner.core.timing import TIMING
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress, endpoint_of

STORE_ERRORS = (BaseError, FileNotFoundError, ValueError)
"""Errors that obstore raises for a request.

They are its own errors, FileNotFoundError for a missing object, and ValueError for a malformed credential.
"""
Answer = TypeVar("Answer")
READ_TRIES = 5
"""Maximum number of tries of a read whose answer breaks off."""
PIECE_BYTES = 4 << 20
"""Minimum size in bytes of the pieces in which an object is downloaded. One piece is in memory at a time."""
_ENDPOINTS = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
"""obstore's option for the server's URL, by the scheme of the address."""
_SECRETS = {"session_token": "token", "sas_token": "sas_key"}
"""obstore's names of credentials, by their names in the job file.

Other credentials have the same name in both.
"""
_ANSWER = re.compile(r"<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<\n]*)", re.DOTALL)
_STATUS = re.compile(r"non-2xx status code: (\d{3}[^:\n]*)")
_AWAY = re.compile(r"error sending request|body error|non-2xx status code: (429|50[0234])")
_NO_CREDENTIALS = "no credentials were found"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_WORDS = {
    **dict.fromkeys(_NO_BUCKET, "there is no such bucket"),
    "SignatureDoesNotMatch": "the credentials are wrong",
    "ExpiredToken": "the session token has expired",
    "AccessDenied": "the credentials do not allow this request",
    "AuthorizationHeaderMalformed": "the region is wrong: set storage.region",
    "PermanentRedirect": "the bucket is in another region: set storage.region",
    "incorrectly configured region": "the bucket is in another region: set storage.region",
    "<Code>NotImplemented": "the store has no conditional writes",
    "169.254.169.254": _NO_CREDENTIALS,
    "metadata.google.internal": _NO_CREDENTIALS,
    "Account must be specified": "the account is missing: set storage.account",
    "body error": "the store's answers break off",
    "error sending request": "the store does not answer",
}
"""Reasons for failures, by a text that the error contains.

The text is a code of the store, the address of a cloud's credentials service, or obstore's own words.
"""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a run, as a listing shows it."""

    name: str
    """Key of the object below the run's URI."""
    e_tag: str
    size: int = 0
    """Size in bytes."""


class RunObjects:
    """The objects below the URI of a run. Thread-safe.

    Methods raise OSError if a request fails (`as_os_error`).
    """

    def __init__(self, address: StoreAddress, storage: StorageSpec) -> None:
        """Configure the client of the bucket, without a request. Raises JobError for wrong settings."""
        self.address = address
        self._bucket = open_bucket(address, storage)

    def create(self, name: str, content: bytes) -> str | None:
        """Create an object and return its ETag; None if an object with other content has this name.

        If the object exists with the same content, an earlier try has created it and only the reply was lost.
        Then its ETag is returned.
        """
        with self._request(name):
            try:
                return _tag(obstore.put(self._bucket, self._key(name), content, mode="create"))
            except AlreadyExistsError:
                return self._e_tag_if(name, content)

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        """Replace an object if it still has this ETag; return its new ETag, or None if it has another one.

        If the object already has the new content, an earlier try has written it and only the reply was lost.
        Then its ETag is returned.
        """
        with self._request(name):
            try:
                condition: Any = {"e_tag": e_tag}
                # In Google's store, conditional writes compare the object's generation instead of its ETag.
                if self.address.scheme == "gs":
                    metadata = obstore.head(self._bucket, self._key(name))
                    if _tag(metadata) != e_tag:
                        return self._e_tag_if(name, content)
                    condition = {"version": metadata["version"]}
                return _tag(obstore.put(self._bucket, self._key(name), content, mode=condition))
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                return self._e_tag_if(name, content)

    def _e_tag_if(self, name: str, content: bytes) -> str | None:
        """Return the ETag of an object if it has exactly this content, else None."""
        stored, e_tag = self.read(name) or (None, None)
        return e_tag if stored == content else None

    def put(self, name: str, content: bytes | Path) -> str:
        """Write or replace an object; return its ETag."""
        with self._request(name):
            return _tag(obstore.put(self._bucket, self._key(name), content))

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's content and ETag; None if it is missing."""

        def get() -> tuple[bytes, str]:
            answer = obstore.get(self._bucket, self._key(name))
            return bytes(answer.bytes()), _tag(answer.meta)

        with contextlib.suppress(FileNotFoundError), self._request(name):
            return read_whole(get)
        return None

    def look(self, name: str) -> tuple[bytes, bytes]:
        """Return an object's content and ETag, both as bytes; both empty if it is missing."""
        content, e_tag = self.read(name) or (b"", "")
        return content, e_tag.encode()

    def download(self, name: str, file: Path) -> str:
        """Write an object's content to a file, piece by piece; return its ETag.

        Raises FileNotFoundError if the object is missing.
        """

        def fetch() -> str:
            answer = obstore.get(self._bucket, self._key(name))
            with file.open("wb") as sink:
                for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                    sink.write(piece)
            return _tag(answer.meta)

        with self._request(name):
            return read_whole(fetch)

    def below(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects whose names begin with `prefix`."""
        # obstore lists only whole directories, so the names are filtered below.
        directory = prefix.rpartition("/")[0]
        key = self._key(directory) if directory else self.address.key
        # A listing returns whole keys. An object's name is the part after the run's own key.
        begin = len(self.address.key) + 1 if self.address.key else 0
        with self._request(""):
            pages = read_whole(lambda: list(obstore.list(self._bucket, key or None)))
        objects = [
            StoredObject(metadata["path"][begin:], _tag(metadata), metadata["size"])
            for page in pages
            for metadata in page
        ]
        return [obj for obj in objects if obj.name and obj.name.startswith(prefix)]

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; ignore missing ones."""
        keys = [self._key(name) for name in names]
        with self._request(""):
            try:
                if keys:
                    obstore.delete(self._bucket, keys)
            except FileNotFoundError:  # Google and Azure stop at a missing object, so delete one by one.
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._bucket, key)

    @contextlib.contextmanager
    def _request(self, name: str) -> Iterator[None]:
        """Convert obstore's errors in the block to OSError; errors of local files pass unchanged."""
        try:
            yield
        except STORE_ERRORS as failure:
            raise as_os_error(failure, f"{self.address}/{name}") from None

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.address.key, name)))


def open_bucket(address: StoreAddress, storage: StorageSpec) -> Any:
    """Return obstore's client for the bucket of an address, without sending a request.

    Raises JobError for settings that obstore refuses.
    """
    config: dict[str, Any] = {}
    endpoint = endpoint_of(address, storage)
    if endpoint:
        config[_ENDPOINTS[address.scheme]] = endpoint
    if storage.region:
        config["region"] = storage.region
    if storage.account and address.scheme == "az":
        config["account_name"] = storage.account
    if storage.anonymous:
        config["skip_signature"] = True
    config |= {_SECRETS.get(name, name): value for name, value in storage.secret_values().items()}
    options: dict[str, Any] = {
        "config": config,
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "connect_timeout": timedelta(seconds=TIMING.store_connect),
            "timeout": timedelta(seconds=TIMING.store_request),
        },
        "retry_config": {
            "max_retries": 5,
            "retry_timeout": timedelta(seconds=TIMING.store_retries),
            "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)},
        },
    }
    if address.scheme == "s3" and not (storage.anonymous or storage.secrets):
        options |= _aws_credentials()
    # Without a token, obstore looks for credentials before a write, even for an anonymous client.
    if address.scheme == "gs" and storage.anonymous:
        options["credential_provider"] = lambda: {"token": "none", "expires_at": None}
    try:
        return obstore.store.from_url(f"{address.scheme}://{address.bucket}", **options)
    except (BaseError, ValueError) as failure:
        raise JobError(f"{address}: cannot be opened: {reason_of(failure)}") from None


def _aws_credentials() -> dict[str, Any]:
    """Return options for the credentials that AWS's own tools find: variables, profiles, roles, SSO.

    Without boto3, there are no options, and obstore finds only variables and roles. Raises JobError if boto3
    finds no credentials.
    """
    if find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - imports boto3

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as failure:  # noqa: BLE001 - botocore has an error class for each way to be misconfigured
        # Boto3CredentialProvider raises ValueError if boto3 finds no credentials.
        why = "none were found" if isinstance(failure, ValueError) else first_line(failure)
        raise JobError(
            f"AWS credentials: {why}",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or storage.anonymous: true for a public bucket",
        ) from None


def e_tag_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the ETag in obstore's metadata of an object; None if the store has none.

    It is in quotes, as conditional writes need it, although Azure's listings omit the quotes.
    """
    e_tag = metadata["e_tag"]
    return f'"{e_tag}"' if e_tag and not e_tag.endswith('"') else e_tag


def _tag(metadata: Any) -> str:
    return e_tag_of(metadata) or ""


def read_whole(request: Callable[[], Answer]) -> Answer:
    """Send a read request, and repeat it if the answer breaks off.

    obstore itself repeats only requests that are refused or get no answer.
    """
    return Retrying(**backoff(_is_truncated, attempts=READ_TRIES, first_s=0.2))(request)


def _is_truncated(failure: BaseException) -> bool:
    return isinstance(failure, BaseError) and "body error" in str(failure)


def reason_of(failure: BaseException) -> str:
    """Return the reason of a failed request in a few words; obstore's own text has many lines."""
    text = str(failure)
    answer = _ANSWER.search(text)
    meaning = next((meaning for words, meaning in _WORDS.items() if words in text), None)
    if answer:  # Users can look up the store's error code, so it is added in brackets.
        return f"{meaning or answer['message'].strip() or answer['code']} ({answer['code']})"
    if meaning:
        return meaning
    if status := _STATUS.search(text):
        return f"the store answered {status[1].strip()}"
    return first_line(failure).removeprefix("Generic ").strip()


def as_os_error(failure: BaseException, name: str) -> OSError:
    """Return the OSError for a failed request about an object; FileNotFoundError for a missing object."""
    text = str(failure)
    # obstore also raises FileNotFoundError for a missing bucket.
    lacks_bucket = any(code in text for code in _NO_BUCKET)
    if isinstance(failure, FileNotFoundError) and not lacks_bucket:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    error = StoreRequestError(errno.EIO, reason_of(failure), name)
    # If the cloud's credentials service does not answer, this machine has no credentials, and waiting does
    # not help.
    error.is_away = error.strerror != _NO_CREDENTIALS and _AWAY.search(text) is not None
    return error
