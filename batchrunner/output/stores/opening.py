"""Opens a bucket by obstore, and says in a few words why a request failed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from batchrunner.core.errors import JobError, StoreRequestError
from batchrunner.core.timing import TIMING
from batchrunner.job.output import StorageSpec
from batchrunner.output.stores.addresses import StoreAddress, endpoint_of

STORE_ERRORS = (BaseError, OSError, ValueError)
"""What a request raises: obstore's own errors, its NotFoundError (an OSError), and a missing credential."""
Answer = TypeVar("Answer")
READ_TRIES = 5
"""Requests for bytes whose answers are cut short, until the read fails."""
_ENDPOINTS = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
"""Name of the option for the address of a store, by scheme."""
_SECRETS = {"session_token": "token", "sas_token": "sas_key"}
"""obstore's names of credentials that have another one here."""
_ANSWER = re.compile(r"<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<]*)</Message>", re.DOTALL)
_STATUS = re.compile(r"non-2xx status code: (\d{3}[^:\n]*)")
_HINTS = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "AuthenticationFailed": "the credentials are wrong",
    "AuthorizationFailure": "the credentials are wrong",
    "AuthenticationRequired": "the credentials are wrong",
    "AuthorizationPermissionMismatch": "the credentials do not allow it",
    "PublicAccessNotPermitted": "the store wants credentials",
    "NoAuthenticationInformation": "the store wants credentials",
    "InvalidAccessKeyId": "the store does not know the credentials",
    "SignatureDoesNotMatch": "the credentials are wrong",
    "InvalidToken": "the session token is wrong",
    "ExpiredToken": "the session token has expired",
    "AccessDenied": "the credentials do not allow it",
    "AuthorizationHeaderMalformed": "the region is wrong: give storage.region",
    "PermanentRedirect": "the bucket is in another region: give storage.region",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "NotImplemented": "the store has no conditional writes",
    "SlowDown": "the store asks for fewer requests",
}
"""What the codes of answers mean."""
_NO_BUCKET = ("(NoSuchBucket)", "(ContainerNotFound)")
_WORDS = {
    "169.254.169.254": "no credentials were found",
    "metadata.google.internal": "no credentials were found",
    "incorrectly configured region": _HINTS["PermanentRedirect"],
    "Account must be specified": "Account must be specified: give storage.account",
    "body error": "its answers are cut short",
    "error sending request": "the store does not answer",
}
"""What words in the text of an error mean: addresses of a cloud's credentials, and the client's own words."""


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
        options["credential_provider"] = _no_google_credentials
    try:
        return obstore.store.from_url(f"{address.scheme}://{address.bucket}", **options)
    except (BaseError, ValueError) as failure:
        raise JobError(f"{address}: cannot be opened: {reason_of(failure)}") from None


def _no_google_credentials() -> dict[str, Any]:
    return {"token": "none", "expires_at": None}


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


def read_whole(read: Callable[[], Answer]) -> Answer:
    """Return what a request reads; one whose answer was cut short is sent again.

    The client itself repeats requests that are refused, or that get no answer.
    """
    again = Retrying(
        retry=retry_if_exception(_is_cut),
        stop=stop_after_attempt(READ_TRIES),
        wait=wait_exponential(multiplier=0.2),
        reraise=True,
    )
    return again(read)


def _is_cut(failure: BaseException) -> bool:
    return isinstance(failure, BaseError) and "body error" in str(failure)


def reason_of(failure: BaseException) -> str:
    """Return why a request failed, in a few words; obstore's own text has many lines."""
    text = str(failure)
    if answer := _ANSWER.search(text):
        code = answer["code"]
        message = (
            answer["message"].strip().partition("\n")[0].strip()
        )  # Azure has lines of IDs and times below
        return f"{_HINTS.get(code, message or code)} ({code})"
    if meaning := next((meaning for words, meaning in _WORDS.items() if words in text), None):
        return meaning
    if status := _STATUS.search(text):
        return f"the store answered {status[1].strip()}"
    first = text.strip().partition("\n")[0]
    return first.removeprefix("Generic ").strip() or type(failure).__name__


def as_os_error(failure: BaseException, name: str) -> OSError:
    """Return the OSError for a failed request about an object: FileNotFoundError where it is not there."""
    reason = reason_of(failure)
    if isinstance(failure, FileNotFoundError) and not reason.endswith(_NO_BUCKET):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return StoreRequestError(errno.EIO, reason, name)
