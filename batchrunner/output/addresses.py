"""URIs of object stores: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`."""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec

from batchrunner.core.errors import BatchrunError, install_command
from batchrunner.job.output import StorageSpec

_STORE = re.compile(r"(s3|gs|az)://([^/?#]+)/?(.*)", re.DOTALL | re.IGNORECASE)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address in an object store: a bucket, and in it a key or the prefix of several keys."""

    scheme: str
    """s3, gs or az."""
    bucket: str
    """Name of the bucket, or of Azure's container."""
    key: str
    """Key without leading or trailing slash; "" for the whole bucket."""

    @property
    def name(self) -> str:
        """Last part of the key; the bucket if there is no key."""
        return self.key.rpartition("/")[2] or self.bucket

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def store_address(path: str) -> StoreAddress | None:
    """Parse the URI of an object store; None for a path, another kind of URI, or one with a query.

    pyarrow reads the URIs of other kinds and those with a query:
    `s3://bucket/in?endpoint_override=host:9000`, `hdfs://host/in`.
    """
    uri = _STORE.fullmatch(path)
    if uri is None or "?" in uri[3]:
        return None
    return StoreAddress(uri[1].lower(), uri[2], uri[3].strip("/"))


def endpoint_of(address: StoreAddress, storage: StorageSpec) -> str | None:
    """Return the store's endpoint if the job or AWS's environment variables name one."""
    if storage.endpoint or address.scheme != "s3":
        return storage.endpoint
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)


def check_client(address: object, error: type[BatchrunError]) -> None:
    """Raise `error` if the client of object stores is not installed."""
    if find_spec("obstore") is None:
        raise error(f"{address}: object stores need a package", hint=install_command("stores"))
