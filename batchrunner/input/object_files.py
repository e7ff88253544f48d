"""Read-only pyarrow file system for an object store; requests are sent by obstore.

The path of an object is `bucket/key`.
"""

import io
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, NoReturn

import obstore
import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress
from batchrunner.output.objects import STORE_ERRORS, as_os_error, e_tag_of, open_bucket, read_whole


class ObjectFiles(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """File system with all buckets of one kind of object store."""

    def __init__(self, scheme: str, storage: StorageSpec) -> None:
        """Prepare access to a kind of store (`scheme`: s3, gs or az). No request is sent yet."""
        self._scheme = scheme
        # `cache` opens each bucket only once.
        self._bucket = cache(lambda name: open_bucket(StoreAddress(scheme, name, ""), storage))
        self.e_tags: dict[str, str] = {}
        """ETag of each object when it was last looked up, by path. A replaced object gets another ETag."""
        self._sizes: dict[str, int] = {}
        """Size in bytes of each object when it was last looked up, by path."""
        self._listed: dict[str, pafs.FileInfo] = {}
        """Objects of the last listing, by path.

        The first lookup of an object takes its entry instead of sending a request.
        """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFiles) and self._scheme == other._scheme

    def get_type_name(self) -> str:
        """Return the kind of store."""
        return self._scheme

    def normalize_path(self, path: str) -> str:
        """Return the path unchanged, because a key may have any form."""
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        """Return the type, size and time of each path; raise OSError.

        A path is a directory if it is not a key itself but keys begin with it.
        """
        return [self._listed.pop(path, None) or self._info(path) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return the objects below a directory, at every depth; raise OSError."""
        bucket = selector.base_dir.partition("/")[0]
        entries = self._objects_below(selector.base_dir)
        # Some tools mark a directory by an empty object whose key ends with a slash.
        objects = [entry for entry in entries if entry["size"] or not entry["path"].endswith("/")]
        infos = [self._record(f"{bucket}/{entry['path']}", entry) for entry in objects]
        # The next lookup of each listed object then needs no request.
        self._listed |= {info.path: info for info in infos}
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open an object for reading from any position; raise OSError."""
        bucket, key = _bucket_and_key(path)
        # `_info` also stores the size and the ETag, which are used below.
        if path not in self._sizes and self._info(path).type != pafs.FileType.File:
            raise FileNotFoundError(path)
        file = _ObjectFile(
            self._bucket(bucket), key, path=path, size=self._sizes[path], e_tag=self.e_tags.get(path)
        )
        return pa.PythonFile(file, mode="r")

    open_input_stream = open_input_file

    def _info(self, path: str) -> pafs.FileInfo:
        """Look up a path in the store; raise OSError."""
        bucket, key = _bucket_and_key(path)
        if key:
            try:
                return self._record(path, obstore.head(self._bucket(bucket), key))
            except FileNotFoundError:
                # No object has this key, but the path may be a directory.
                pass
            except STORE_ERRORS as failure:
                raise as_os_error(failure, path) from None
        is_directory = any(self._objects_below(path, most_pages=1))
        return pafs.FileInfo(path, pafs.FileType.Directory if is_directory else pafs.FileType.NotFound)

    def _objects_below(self, directory: str, most_pages: int | None = None) -> Iterator[Any]:
        """Yield the objects below a directory; raise OSError if the store cannot be read.

        At most `most_pages` pages of the store's listing are read; None means all pages.
        """
        bucket, key = _bucket_and_key(directory)
        prefix = f"{key.rstrip('/')}/" if key else None

        def list_pages() -> list[Any]:
            # The listing is read page by page.
            pages = obstore.list(self._bucket(bucket), prefix)
            return list(islice(pages, most_pages))

        try:
            # `read_whole` starts the listing again if it breaks off.
            pages = read_whole(list_pages)
        except STORE_ERRORS as failure:
            raise as_os_error(failure, directory) from None
        return (entry for page in pages for entry in page)

    def _record(self, path: str, info: Any) -> pafs.FileInfo:
        """Store the ETag and the size of an object, and convert obstore's `info` to pyarrow's FileInfo."""
        if e_tag := e_tag_of(info):
            self.e_tags[path] = e_tag
        self._sizes[path] = info["size"]
        return pafs.FileInfo(path, pafs.FileType.File, size=info["size"], mtime=info["last_modified"])

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("this file system is read-only")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _read_only
    delete_file = move = copy_file = open_output_stream = open_append_stream = _read_only


class _ObjectFile(io.RawIOBase):
    """Open object. Reading fails if the object has been replaced, so that bytes of two objects never mix."""

    def __init__(self, bucket: Any, key: str, *, path: str, size: int, e_tag: str | None) -> None:
        super().__init__()
        self._bucket, self._key, self._path = bucket, key, path
        self._condition: obstore.GetOptions = {"if_match": e_tag} if e_tag else {}
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes from the current position; raise OSError if the object was replaced."""
        end = self._size if size < 0 else min(self._position + size, self._size)
        if self._position >= end:
            return b""
        # The store refuses the request if the object's ETag has changed.
        options: obstore.GetOptions = {**self._condition, "range": (self._position, end)}
        try:
            data = bytes(read_whole(lambda: obstore.get(self._bucket, self._key, options=options).bytes()))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self._path) from None
        self._position += len(data)
        return data


def _bucket_and_key(path: str) -> tuple[str, str]:
    """Split a path into the bucket and the key; the key of a bucket itself is ""."""
    bucket, _, key = path.partition("/")
    return bucket, key
