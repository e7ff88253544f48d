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
    """Address of an object in an object store, or of all objects whose keys begin with a common prefix."""

    scheme: str
    """Kind of store: s3, gs or az."""
    bucket: str
    """Name of the bucket, or of Azure's container."""
    key: str
    """Key without leading or trailing slash; "" for the whole bucket."""

    @property
    def name(self) -> str:
        """Last part of the key, or the bucket if there is no key."""
        return self.key.rpartition("/")[2] or self.bucket

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def store_address(path: str) -> StoreAddress | None:
    """Parse the URI of an object store; return None for a local path or a URI that pyarrow must read.

    pyarrow reads URIs of other kinds (`hdfs://host/in`), and every URI with a query
    (`s3://bucket/in?endpoint_override=host:9000`).
    """
    uri = _STORE.fullmatch(path)
    if uri is None or "?" in uri[3]:
        return None
    return StoreAddress(uri[1].lower(), uri[2], uri[3].strip("/"))


def endpoint_of(address: StoreAddress, storage: StorageSpec) -> str | None:
    """Return the URL of the store's server: `storage.endpoint`, or for S3 one of AWS's environment variables.

    It is None if neither is set. obstore then uses the cloud's own address.
    """
    if storage.endpoint:
        return storage.endpoint
    if address.scheme != "s3":
        return None
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)


def check_client(address: object, error: type[BatchrunError]) -> None:
    """Raise `error` if obstore, the client library for object stores, is not installed."""
    if find_spec("obstore") is None:
        raise error(f"{address}: object stores need the package obstore", hint=install_command("stores"))
