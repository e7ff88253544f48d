"""Results of an earlier run as input: `input.path` may be the directory of a run."""

from collections.abc import Sequence
from pathlib import Path

from batchrunner.core.errors import InputError
from batchrunner.input.files import file_lock, names_run
from batchrunner.job.output import StorageSpec
from batchrunner.output.merge import merge, merged_rows
from batchrunner.output.resume import done_by_all
from batchrunner.output.run_dir import look_at_run
from batchrunner.output.run_json import require_run_json


def with_merged_results(
    paths: str | Sequence[str], *, run: Path | None = None, storage: StorageSpec | None = None
) -> list[str]:
    """Return paths of input files, with the merged results of a run in place of its directory.

    `run` is the run that reads the input, whose own directory is left as it is. Raises InputError if another
    run is not done, and what merging raises.
    """
    storage = storage or StorageSpec()
    paths = [paths] if isinstance(paths, str) else paths
    return [
        _merged_directory(path, storage) if run != Path(path).resolve() and names_run(path, storage) else path
        for path in paths
    ]


def _merged_directory(path: str, storage: StorageSpec) -> str:
    """Return where the merged results of a run lie; they are merged unless they are already."""
    run_dir = look_at_run(path, storage)
    done, total = len(done_by_all(run_dir).rows), require_run_json(run_dir)["rows_total"]
    if done < total:
        raise InputError(
            f"{path}: this run is not done: {done:,} of {total:,} rows",
            hint=f"run it again, or take what is there: {path}/parts",
        )
    if merged_rows(run_dir) < total:
        with file_lock(run_dir.path / ".merging", unfinished=".merge-*/**/*"):
            if merged_rows(run_dir) < total > merge(run_dir).rows:
                raise InputError(f"{path}: this run is still at work", hint="try again when it has ended")
    return f"{path}/merged"
