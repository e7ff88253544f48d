"""The `storage` part of a job: how the object stores of `input.path` and `output.path` are reached."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from batchrunner.core.errors import JobError, WrongValueError
from batchrunner.job.fields import Spec, UserPath

Secret: TypeAlias = Literal[
    "access_key_id", "secret_access_key", "session_token", "account_key", "sas_token", "service_account_key"
]
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_ENDPOINT = re.compile(r"https?://[^/\s]+.*")


class StorageSpec(Spec):
    """How object stores are reached. What is left out is found as the cloud's own tools find it."""

    endpoint: str | None = None
    """Address of a store that is not the cloud's own, such as MinIO's: `http://host:9000`."""
    region: str | None = None
    """Region of the bucket, such as `eu-central-1`."""
    anonymous: bool = False
    """Whether requests go without credentials, as public buckets allow."""
    account: Annotated[str, Field(min_length=1)] | None = None
    """Account of an Azure store; by default that of the variable `AZURE_STORAGE_ACCOUNT_NAME`."""
    secrets: dict[Secret, Annotated[str, Field(min_length=1)]] = {}
    """Names of the environment variables that hold credentials, by what they are: `access_key_id`,
    `secret_access_key` and `session_token` of S3, `account_key` or `sas_token` of Azure,
    `service_account_key` of Google (its JSON). The job file holds no secret itself."""

    copies: UserPath | None = None
    """Directory for the working copy of a run whose `output.path` is in a store, as large as its results; by
    default the cache directory. Keep it: rows that a killed run had not uploaded are there."""

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError(f"an address starts with http:// or https:// (got {endpoint!r})")
        return endpoint

    @model_validator(mode="after")
    def _one_way(self) -> StorageSpec:
        if self.anonymous and self.secrets:
            raise WrongValueError(
                "storage.anonymous goes without credentials, and storage.secrets names some",
                hint="leave one of them out",
                mark=";",
            )
        return self

    def secret_values(self) -> dict[str, str]:
        """Return the credentials; raises JobError where a variable is not set."""
        found: dict[str, str] = {}
        for name, variable in self.secrets.items():
            if not _VARIABLE.fullmatch(variable):  # most likely the secret itself, which no message shows
                raise JobError(
                    f"storage.secrets.{name}: this is no name of an environment variable",
                    hint="export the secret as a variable, and give the variable's name",
                )
            value = os.environ.get(variable)
            if not value:
                raise JobError(f"storage.secrets.{name}: the environment variable {variable} is not set")
            found[name] = value
        return found
