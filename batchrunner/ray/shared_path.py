"""Whether the nodes of a cluster see the files of the command that started a job."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.runtime_env.packaging import get_local_dir_from_uri, get_local_dir_uri_path

from batchrunner.core.errors import JobError, OutputError
from batchrunner.output.files import make_directory, writing
from batchrunner.output.stores.addresses import store_address


@dataclass(frozen=True, slots=True)
class SharedPath:
    """The command's directory, where relative paths start, and a mark beside the job's results."""

    directory: str
    """In a job of `ray job submit` with a working directory, of which Ray gives each node a copy to start its
    processes in: relative to this copy, since nodes may have it at different places."""
    output: str
    """The job's output path, as the job has it."""
    mark: str | None
    """Path of a file that every node must see; None where the results are in an object store."""

    def enter(self) -> None:
        """Go to the command's directory, and look for the mark; raises JobError where a node lacks one."""
        host = socket.gethostname()
        try:
            os.chdir(self.directory)
        except OSError as failure:
            raise JobError(
                f"{self.directory}: the node {host} has no such directory ({failure.strerror}), and relative "
                "paths of the job start there",
                hint="start the command in a directory that all nodes share",
                mark=";",
            ) from None
        if self.mark is not None and not Path(self.mark).exists():
            raise JobError(
                f"output.path {self.output}: the node {host} does not share it with this one",
                hint="give a path on a file system that all nodes share, or a URI of an object store",
                mark=";",
            )


@contextlib.contextmanager
def shared_path(output: str) -> Iterator[SharedPath]:
    """Give the paths that the workers look for; the mark is there meanwhile.

    Raises OutputError, and JobError where the results would be deleted with Ray's copy of a directory.
    """
    here, copy = Path.cwd(), _copied_directory()
    directory = str(here if copy is None else here.relative_to(copy))
    if store_address(output) is not None:
        yield SharedPath(directory, output, None)
        return
    path = Path(output).expanduser().absolute()
    if copy is not None and path.resolve().is_relative_to(copy):
        raise JobError(
            f"output.path {output}: it is in the copy of the working directory that Ray made for this job, "
            "and Ray deletes it after the job",
            hint="give an absolute path on a file system that all nodes share, or a URI of an object store",
            mark=";",
        )
    mark = path.with_name(f".{path.name}-{secrets.token_hex(4)}.ray")
    try:
        with writing(path.parent):
            make_directory(path.parent)
        mark.touch()
    except OSError as failure:
        raise OutputError(f"{path.parent}: cannot be written: {failure.strerror}") from None
    try:
        yield SharedPath(directory, output, str(mark))
    finally:
        mark.unlink(missing_ok=True)


def _copied_directory() -> Path | None:
    """Return Ray's copy of the working directory of its job, where this process is in one."""
    uri = ray.get_runtime_context().runtime_env.working_dir()
    if not uri or get_local_dir_uri_path(uri) is not None:  # a directory that is on each node already
        return None
    name = get_local_dir_from_uri(uri, "").name
    here = Path.cwd()
    return next((each for each in (here, *here.parents) if each.name == name), None)
