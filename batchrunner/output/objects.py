"""Objects of a store by obstore: a bucket is opened, a condition makes a write exclusive, errors say why."""

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

from batchrunner.core.errors import JobError, StoreRequestError
from batchrunner.core.retry import backoff
from batchrunner.core.timing import TIMING
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress, endpoint_of

STORE_ERRORS = (BaseError, FileNotFoundError, ValueError)
"""What a request raises: obstore's own errors, one for an object that is not there, a missing credential."""
Answer = TypeVar("Answer")
READ_TRIES = 5
"""Requests for bytes whose answers are cut short, until the read fails."""
PIECE_BYTES = 4 << 20
"""Least bytes of an object that are in memory while it is downloaded."""
_ENDPOINTS = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
"""Name of the option for the address of a store, by scheme."""
_SECRETS = {"session_token": "token", "sas_token": "sas_key"}
"""obstore's names of credentials that have another one here."""
_ANSWER = re.compile(r"<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<\n]*)", re.DOTALL)
_STATUS = re.compile(r"non-2xx status code: (\d{3}[^:\n]*)")
_AWAY = re.compile(r"error sending request|body error|non-2xx status code: (429|50[0234])")
_NO_CREDENTIALS = "no credentials were found"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_WORDS = {
    **dict.fromkeys(_NO_BUCKET, "there is no such bucket"),
    "SignatureDoesNotMatch": "the credentials are wrong",
    "ExpiredToken": "the session token has expired",
    "AccessDenied": "the credentials do not allow it",
    "AuthorizationHeaderMalformed": "the region is wrong: give storage.region",
    "PermanentRedirect": "the bucket is in another region: give storage.region",
    "incorrectly configured region": "the bucket is in another region: give storage.region",
    "<Code>NotImplemented": "the store has no conditional writes",
    "169.254.169.254": _NO_CREDENTIALS,
    "metadata.google.internal": _NO_CREDENTIALS,
    "Account must be specified": "Account must be specified: give storage.account",
    "body error": "its answers are cut short",
    "error sending request": "the store does not answer",
}
"""What words in the text of an error mean: codes of answers, addresses of a cloud's credentials, the client's
own words."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a run."""

    name: str
    """Its key below the run's URI."""
    e_tag: str
    size: int = 0


class RunObjects:
    """The objects below a URI. Methods may be called from several threads, and raise OSError."""

    def __init__(self, address: StoreAddress, storage: StorageSpec) -> None:
        """Send nothing; raises JobError."""
        self.address = address
        self._bucket = open_bucket(address, storage)

    def create(self, name: str, content: bytes) -> str | None:
        """Create an object and return its e_tag; None where another one has the name.

        Where the reply to a first try was lost, the object is there, with this content: then it is ours.
        """
        with self._request(name):
            try:
                return _tag(obstore.put(self._bucket, self._key(name), content, mode="create"))
            except AlreadyExistsError:
                return self._e_tag_if(name, content)

    def swap(self, name: str, content: bytes, e_tag: str) -> str | None:
        """Replace an object that still has this e_tag; return the new one, None where it has another.

        A lost reply is recognised as in `create`.
        """
        with self._request(name):
            try:
                mode: Any = {"e_tag": e_tag}
                if self.address.scheme == "gs":  # its conditions name a generation, which no listing tells
                    found = obstore.head(self._bucket, self._key(name))
                    if _tag(found) != e_tag:
                        return self._e_tag_if(name, content)
                    mode = {"version": found["version"]}
                return _tag(obstore.put(self._bucket, self._key(name), content, mode=mode))
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                return self._e_tag_if(name, content)

    def _e_tag_if(self, name: str, content: bytes) -> str | None:
        """Return the e_tag of an object that has this content."""
        found = self.read(name)
        return found[1] if found is not None and found[0] == content else None

    def put(self, name: str, content: bytes | Path) -> str:
        """Write an object, also in place of another; return its e_tag."""
        with self._request(name):
            return _tag(obstore.put(self._bucket, self._key(name), content))

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's content and e_tag; None where there is none."""

        def read() -> tuple[bytes, str]:
            found = obstore.get(self._bucket, self._key(name))
            return bytes(found.bytes()), _tag(found.meta)

        with contextlib.suppress(FileNotFoundError), self._request(name):
            return read_whole(read)
        return None

    def look(self, name: str) -> tuple[bytes, bytes]:
        """Return an object's content and e_tag as bytes, which are empty where there is none."""
        content, e_tag = self.read(name) or (b"", "")
        return content, e_tag.encode()

    def download(self, name: str, file: Path) -> str:
        """Write an object's content to a file, piece by piece; return its e_tag.

        Raises FileNotFoundError where there is none.
        """

        def fetch() -> str:
            found = obstore.get(self._bucket, self._key(name))
            with file.open("wb") as sink:
                for piece in found.stream(min_chunk_size=PIECE_BYTES):
                    sink.write(piece)
            return _tag(found.meta)

        with self._request(name):
            return read_whole(fetch)

    def below(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects whose names begin so."""
        directory = prefix.rpartition("/")[0]  # a client of a store lists whole directories
        key = self._key(directory) if directory else self.address.key
        begin = len(self.address.key) + 1 if self.address.key else 0
        with self._request(""):
            pages = read_whole(lambda: list(obstore.list(self._bucket, key or None)))
        every = [
            StoredObject(found["path"][begin:], _tag(found), found["size"])
            for page in pages
            for found in page
        ]
        return [each for each in every if each.name and each.name.startswith(prefix)]

    def delete(self, names: Collection[str]) -> None:
        """Delete objects, where they are there."""
        keys = [self._key(name) for name in names]
        with self._request(""):
            try:
                if keys:
                    obstore.delete(self._bucket, keys)
            except FileNotFoundError:  # Google and Azure stop at one that is not there
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._bucket, key)

    @contextlib.contextmanager
    def _request(self, name: str) -> Iterator[None]:
        """Turn errors of a request about an object into OSError; those of files on this machine pass."""
        try:
            yield
        except STORE_ERRORS as failure:
            raise as_os_error(failure, f"{self.address}/{name}") from None

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self.address.key, name)))


def open_bucket(address: StoreAddress, storage: StorageSpec) -> Any:
    """Return obstore's store of the whole bucket; sends nothing. Raises JobError."""
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
    if address.scheme == "gs" and storage.anonymous:  # writes would look for credentials all the same
        options["credential_provider"] = lambda: {"token": "none", "expires_at": None}
    try:
        return obstore.store.from_url(f"{address.scheme}://{address.bucket}", **options)
    except (BaseError, ValueError) as failure:
        raise JobError(f"{address}: cannot be opened: {reason_of(failure)}") from None


def _aws_credentials() -> dict[str, Any]:
    """Return the options for the credentials that AWS's own tools find: variables, profiles, roles, SSO.

    Where boto3 is missing, obstore finds those of variables and roles by itself.
    """
    if find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - imports boto3

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as failure:  # noqa: BLE001 - botocore has an error class for each way to be misconfigured
        why = "none were found" if isinstance(failure, ValueError) else str(failure).partition("\n")[0]
        raise JobError(
            f"AWS credentials: {why}",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
            "or storage.anonymous for a public bucket",
        ) from None


def e_tag_of(found: Mapping[str, Any]) -> str | None:
    """Return the e_tag of an object in quotes, as conditions take it; None where the store has none.

    `found` is what obstore tells of an object. In a listing of Azure the quotes are missing.
    """
    e_tag = found["e_tag"]
    return f'"{e_tag}"' if e_tag and not e_tag.endswith('"') else e_tag


def _tag(found: Any) -> str:
    return e_tag_of(found) or ""


def read_whole(read: Callable[[], Answer]) -> Answer:
    """Return what a request reads; one whose answer was cut short is sent again.

    The client itself repeats requests that are refused, or that get no answer.
    """
    return Retrying(**backoff(_is_cut, attempts=READ_TRIES, first_s=0.2))(read)


def _is_cut(failure: BaseException) -> bool:
    return isinstance(failure, BaseError) and "body error" in str(failure)


def reason_of(failure: BaseException) -> str:
    """Return why a request failed, in a few words; obstore's own text has many lines."""
    text = str(failure)
    answer = _ANSWER.search(text)
    meaning = next((meaning for words, meaning in _WORDS.items() if words in text), None)
    if answer:
        return f"{meaning or answer['message'].strip() or answer['code']} ({answer['code']})"
    if meaning:
        return meaning
    if status := _STATUS.search(text):
        return f"the store answered {status[1].strip()}"
    first = text.strip().partition("\n")[0]
    return first.removeprefix("Generic ").strip() or type(failure).__name__


def as_os_error(failure: BaseException, name: str) -> OSError:
    """Return the OSError for a failed request about an object: FileNotFoundError where it is not there."""
    if isinstance(failure, FileNotFoundError) and not any(code in str(failure) for code in _NO_BUCKET):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    error = StoreRequestError(errno.EIO, reason_of(failure), name)
    error.is_away = error.strerror != _NO_CREDENTIALS and _AWAY.search(str(failure)) is not None
    return error
