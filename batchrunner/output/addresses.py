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
    """A bucket, and a key or the beginning of keys in it."""

    scheme: str
    """s3, gs or az."""
    bucket: str
    """Name of the bucket; of the container for Azure."""
    key: str
    """Key without a slash at its beginning or end; "" for the whole bucket."""

    @property
    def name(self) -> str:
        """Last part of the key, or the bucket."""
        return self.key.rpartition("/")[2] or self.bucket

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def store_address(given: str) -> StoreAddress | None:
    """Return the address that a text is; None for a path, or a URI of another kind or with a query.

    pyarrow reads those: `s3://bucket/in?endpoint_override=host:9000`, `hdfs://host/in`.
    """
    found = _STORE.fullmatch(given)
    if found is None or "?" in found[3]:
        return None
    return StoreAddress(found[1].lower(), found[2], found[3].strip("/"))


def endpoint_of(address: StoreAddress, storage: StorageSpec) -> str | None:
    """Return the address of the store, where the job or AWS's own variables give it."""
    if storage.endpoint or address.scheme != "s3":
        return storage.endpoint
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), None)


def check_client(address: object, error: type[BatchrunError]) -> None:
    """Raise `error` where the client of object stores is not installed."""
    if find_spec("obstore") is None:
        raise error(f"{address}: object stores need a package", hint=install_command("stores"))
