"""Whether the nodes of a cluster see the files of the command that started a job."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchrunner.core.errors import JobError, OutputError
from batchrunner.output.files import make_directory, writing
from batchrunner.output.stores.addresses import store_address


@dataclass(frozen=True, slots=True)
class SharedPath:
    """The command's directory, where relative paths start, and a mark beside the job's results."""

    directory: str
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
    """Give the paths that the workers look for; the mark is there meanwhile. Raises OutputError."""
    if store_address(output) is not None:
        yield SharedPath(str(Path.cwd()), output, None)
        return
    path = Path(output).expanduser().absolute()
    mark = path.with_name(f".{path.name}-{secrets.token_hex(4)}.ray")
    try:
        with writing(path.parent):
            make_directory(path.parent)
        mark.touch()
    except OSError as failure:
        raise OutputError(f"{path.parent}: cannot be written: {failure.strerror}") from None
    try:
        yield SharedPath(str(Path.cwd()), output, str(mark))
    finally:
        mark.unlink(missing_ok=True)
