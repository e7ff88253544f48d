"""The objects of a store as a read-only file system of pyarrow, read by obstore. A path is `bucket/key`."""

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
    """All buckets of one kind of store."""

    def __init__(self, scheme: str, storage: StorageSpec) -> None:
        """`scheme` is s3, gs or az. Sends nothing."""
        self._scheme = scheme
        self._bucket = cache(lambda name: open_bucket(StoreAddress(scheme, name, ""), storage))
        self.e_tags: dict[str, str] = {}
        """ETag of each object when it was last looked up, by path. A replaced object has another ETag."""
        self._sizes: dict[str, int] = {}
        self._listed: dict[str, pafs.FileInfo] = {}  # a listing; answers one look-up of each path

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFiles) and self._scheme == other._scheme

    def get_type_name(self) -> str:
        """Return the kind of store."""
        return self._scheme

    def normalize_path(self, path: str) -> str:
        """Return the path as it is."""
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        """Return the type, size and time of each path. A key with other keys below it is a directory."""
        return [self._listed.pop(path, None) or self._info(path) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return the objects below a directory, at every depth."""
        name = selector.base_dir.partition("/")[0]
        entries = self._below(selector.base_dir)
        # some tools mark a directory by an empty object
        files = [entry for entry in entries if entry["size"] or not entry["path"].endswith("/")]
        infos = [self._noted(f"{name}/{entry['path']}", entry) for entry in files]
        self._listed |= {info.path: info for info in infos}
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open an object for reading from any position; raises OSError."""
        name, key = _parts(path)
        if path not in self._sizes and self._info(path).type != pafs.FileType.File:
            raise FileNotFoundError(path)
        opened = _ObjectFile(
            self._bucket(name), key, path=path, size=self._sizes[path], e_tag=self.e_tags.get(path)
        )
        return pa.PythonFile(opened, mode="r")

    open_input_stream = open_input_file

    def _info(self, path: str) -> pafs.FileInfo:
        name, key = _parts(path)
        if key:
            try:
                return self._noted(path, obstore.head(self._bucket(name), key))
            except FileNotFoundError:
                pass
            except STORE_ERRORS as failure:
                raise as_os_error(failure, path) from None
        is_directory = any(self._below(path, at_most=1))
        return pafs.FileInfo(path, pafs.FileType.Directory if is_directory else pafs.FileType.NotFound)

    def _below(self, directory: str, at_most: int | None = None) -> Iterator[Any]:
        name, key = _parts(directory)
        prefix = f"{key.rstrip('/')}/" if key else None
        try:
            pages = read_whole(lambda: list(islice(obstore.list(self._bucket(name), prefix), at_most)))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, directory) from None
        return (entry for page in pages for entry in page)

    def _noted(self, path: str, info: Any) -> pafs.FileInfo:
        if e_tag := e_tag_of(info):
            self.e_tags[path] = e_tag
        self._sizes[path] = info["size"]
        return pafs.FileInfo(path, pafs.FileType.File, size=info["size"], mtime=info["last_modified"])

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("the input is read only")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _read_only
    delete_file = move = copy_file = open_output_stream = open_append_stream = _read_only


class _ObjectFile(io.RawIOBase):
    """An open object. If another object has taken its key, reading fails instead of mixing their bytes."""

    def __init__(self, bucket: Any, key: str, *, path: str, size: int, e_tag: str | None) -> None:
        super().__init__()
        self._bucket, self._key, self._path = bucket, key, path
        self._condition: obstore.GetOptions = {"if_match": e_tag} if e_tag else {}
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        if self._at >= end:
            return b""
        options: obstore.GetOptions = {**self._condition, "range": (self._at, end)}
        try:
            data = bytes(read_whole(lambda: obstore.get(self._bucket, self._key, options=options).bytes()))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self._path) from None
        self._at += len(data)
        return data


def _parts(path: str) -> tuple[str, str]:
    """Return the bucket of a path, and the key in it."""
    name, _, key = path.partition("/")
    return name, key
