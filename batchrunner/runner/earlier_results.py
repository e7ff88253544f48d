"""Results of an earlier run as input: `input.path` may be the directory of a run."""

from collections.abc import Sequence
from pathlib import Path

from batchrunner.input.files import names_run
from batchrunner.job.output import StorageSpec
from batchrunner.output.run_dir import look_at_run


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
    from batchrunner.output.merge import merge_finished_run  # noqa: PLC0415 - only for such an input

    merge_finished_run(look_at_run(path, storage), path)
    return f"{path}/merged"
