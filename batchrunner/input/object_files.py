"""The objects of a store as a file system of pyarrow, by obstore. A path is `bucket/key`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, NoReturn

import obstore
import pyarrow as pa
import pyarrow.fs as pafs

from batchrunner.input.object_state import ObjectState
from batchrunner.input.read_ahead import BLOCK_BYTES, BlockFile
from batchrunner.input.small_objects import SmallObjects
from batchrunner.job.output import StorageSpec
from batchrunner.output.stores.addresses import StoreAddress
from batchrunner.output.stores.opening import STORE_ERRORS, as_os_error, e_tag_of, open_bucket, read_whole

FETCHERS = 16
"""Requests for bytes of files that are under way at once."""


class ObjectFiles(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """All buckets of one kind of store, to be read only."""

    def __init__(self, scheme: str, storage: StorageSpec) -> None:
        """`scheme` is s3, gs or az. Sends nothing."""
        self._scheme = scheme
        self._storage = storage
        self._buckets: dict[str, Any] = {}
        self._states: dict[str, ObjectState] = {}  # as they were seen last
        self._fresh: set[str] = set()  # of these, those that a listing has just shown
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="store")
        self._small = SmallObjects(self._pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFiles) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._scheme)

    def get_type_name(self) -> str:
        """Return the kind of store."""
        return self._scheme

    def normalize_path(self, path: str) -> str:
        """Return the path as it is."""
        return path

    def state(self, path: str) -> ObjectState:
        """Return what the store says of an object now; raises OSError, FileNotFoundError where it is gone.

        What a listing has just shown is not asked again, once.
        """
        with self._lock:
            if path in self._fresh:
                self._fresh.discard(path)
                return self._states[path]
        bucket, key = self._find(path)
        try:
            found = obstore.head(bucket, key)
        except STORE_ERRORS as failure:
            raise as_os_error(failure, path) from None
        return self._note(path, found)

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        """Return what the paths are: a key below which there are others is a directory."""
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return the objects below a directory, at every depth."""
        found = []
        for path, state in self._below(selector.base_dir):
            with self._lock:
                self._fresh.add(path)
            found.append(_file_info(path, state))
        return found

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open an object to be read at any place; raises OSError."""
        state = self._states.get(path) or self.state(path)
        bucket, key = self._find(path)
        ranges = _ObjectRanges(bucket, key, path, state)
        if state.e_tag and state.size <= BLOCK_BYTES:
            return pa.BufferReader(self._small.read(path, ranges))
        return pa.PythonFile(BlockFile(ranges, self._pool), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open an object to be read from its beginning; raises OSError."""
        return self.open_input_file(path)

    def read_samples(self, path: str, starts: Sequence[int], size: int) -> list[bytes]:
        """Return `size` bytes from each of these places, fetched at once; raises OSError."""
        e_tag = (self._states.get(path) or self.state(path)).e_tag
        small = self._small.find(path, e_tag) if e_tag else None
        if small is not None:
            whole = memoryview(small)
            return [bytes(whole[at : at + size]) for at in starts]
        bucket, key = self._find(path)
        try:
            data = read_whole(
                lambda: b"".join(
                    bytes(block)
                    for block in obstore.get_ranges(
                        bucket, key, starts=list(starts), lengths=[size] * len(starts)
                    )
                )
            )
        except STORE_ERRORS as failure:
            raise as_os_error(failure, path) from None
        return [data[at : at + size] for at in range(0, len(data), size)]

    def _info(self, path: str) -> pafs.FileInfo:
        _, key = self._find(path)
        if key:
            try:
                return _file_info(path, self.state(path))
            except FileNotFoundError:
                pass
        is_directory = any(self._pages(path, at_most=1))
        return pafs.FileInfo(path, pafs.FileType.Directory if is_directory else pafs.FileType.NotFound)

    def _below(self, directory: str) -> Iterator[tuple[str, ObjectState]]:
        """Yield the objects below a directory."""
        name = directory.partition("/")[0]
        for found in chain.from_iterable(self._pages(directory)):
            if found["size"] or not found["path"].endswith("/"):  # some tools mark directories
                path = f"{name}/{found['path']}"
                yield path, self._note(path, found)

    def _pages(self, directory: str, at_most: int | None = None) -> list[Any]:
        bucket, key = self._find(directory)
        prefix = f"{key.rstrip('/')}/" if key else None
        try:
            return read_whole(lambda: list(islice(obstore.list(bucket, prefix), at_most)))
        except STORE_ERRORS as failure:
            raise as_os_error(failure, directory) from None

    def _note(self, path: str, found: Any) -> ObjectState:
        state = ObjectState(found["size"], found["last_modified"], e_tag_of(found))
        with self._lock:
            self._states[path] = state
        return state

    def _find(self, path: str) -> tuple[Any, str]:
        """Return the bucket of a path, and the key in it."""
        name, _, key = path.partition("/")
        with self._lock:
            if name not in self._buckets:
                self._buckets[name] = open_bucket(StoreAddress(self._scheme, name, ""), self._storage)
            return self._buckets[name], key

    def _key(self) -> tuple[str, str]:
        return self._scheme, self._storage.model_dump_json()

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("the input is read only")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _read_only
    delete_file = move = copy_file = open_output_stream = open_append_stream = _read_only


class _ObjectRanges:
    """An object as it was when it was opened: bytes of another one under its key are never returned."""

    def __init__(self, bucket: Any, key: str, path: str, state: ObjectState) -> None:
        self._bucket, self._key, self._path = bucket, key, path
        self._state = state
        self.size = state.size

    def fetch(self, begin: int, end: int) -> bytes:
        return bytes(self._get({"range": (begin, end)}, end - begin))

    @property
    def e_tag(self) -> str:
        return self._state.e_tag or ""

    def fetch_all(self) -> memoryview:
        return memoryview(self._get({}, self.size))

    def check(self) -> None:
        """Raise OSError where the object has changed, or is gone."""
        try:
            is_same = e_tag_of(obstore.head(self._bucket, self._key)) == self._state.e_tag
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self._path) from None
        if not is_same:
            raise OSError(f"{self._path}: it changed since it was opened")

    def _get(self, options: obstore.GetOptions, size: int) -> obstore.Bytes:
        if self._state.e_tag:
            options["if_match"] = self._state.e_tag
        try:
            data = read_whole(lambda: obstore.get(self._bucket, self._key, options=options).bytes())
        except STORE_ERRORS as failure:
            raise as_os_error(failure, self._path) from None
        if len(data) != size:
            raise OSError(f"{self._path}: {len(data)} bytes came, not {size}")
        return data


def _file_info(path: str, state: ObjectState) -> pafs.FileInfo:
    return pafs.FileInfo(path, pafs.FileType.File, size=state.size, mtime=state.changed)
