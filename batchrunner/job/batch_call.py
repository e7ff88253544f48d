"""The job of `batchrun batch`, from its arguments."""

import logging
from collections.abc import Sequence
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.job.fields import user_path
from batchrunner.job.load import load_job, parse_engine, read_job_file
from batchrunner.job.spec import Job

log = logging.getLogger(__name__)

KEPT = {"engine", "limits", "order", "window", "queue", "dedupe", "bundle", "storage"}
"""Parts of a base job that hold for a batch file; of `output` those of OUTPUT_KEPT do."""
CUSTOM_ID = "custom_id"
"""The column that the results name their requests by."""
OUTPUT_KEPT = {"part_rows", "durable"}


def job_of_batch(
    requests: str,
    run: str,
    *,
    model: str | None,
    urls: Sequence[str],
    base: str | None,
    lenient: bool,
    overrides: Sequence[str],
) -> Job:
    """Return the job that sends the lines of the file `requests`; its run directory is `run`.

    The engine is a server for a `model`, the servers at `urls`, or that of the job file `base`, whose limits,
    order and window hold too. A line that is no request keeps the run from beginning unless `lenient`. By
    default any number of lines may fail. Raises JobError.
    """
    given = [name for name, value in (("--model", model), ("--url", urls), ("--job", base)) if value]
    if len(given) != 1:
        got = " and ".join(given) or "none of --model, --url and --job"
        raise JobError(f"engine: got {got}", hint="give one of --model, --url and --job")
    tree: dict[str, Any] = {} if base is None else _base(base)
    if base is None:
        engine = parse_engine(model or list(urls))
        tree["engine"] = engine.model_dump(exclude_unset=True)
    output, limits = (_mapping(tree, name) for name in ("output", "limits"))
    tree |= {
        "input": {"path": requests, "columns": [CUSTOM_ID]},
        "prompt": {"batch": "lenient" if lenient else "strict"},
        "output": {**output, "path": run},
        "limits": {"max_failed_rows": 1.0, "abort_failed_share": 1.0, **limits},
    }
    job = load_job(tree, overrides=overrides, name=_named(base) if base else "batch")
    _refuse_other_files(job, requests, run)
    return job


def _refuse_other_files(job: Job, requests: str, run: str) -> None:
    """Raise JobError for a job whose results could not be published, since it is not about these files."""
    source = job.input
    as_given = {
        "input.path": source.path == user_path(requests),
        "output.path": job.output.path == user_path(run),
        "prompt": job.prompt.batch is not None,
        "input.columns": CUSTOM_ID in source.columns,
        "input.rename": CUSTOM_ID not in source.rename,
    }
    for name, holds in as_given.items():
        if not holds:
            raise JobError(f"{name}: the command sets it itself", hint="leave it out of --set")


def _named(path: str) -> str:
    return "standard input" if path == "-" else path


def _base(path: str) -> dict[str, Any]:
    """Return the parts of a job file that hold for a batch file; unknown ones too, which are refused."""
    tree = read_job_file(path)
    output = _mapping(tree, "output")
    left_out = [name for name in tree if name in Job.model_fields and name not in {*KEPT, "output"}]
    if left_out:
        said = ", ".join(left_out)
        log.info("%s: %s are left out: each line of the batch file has its own", _named(path), said)
    kept = {name: value for name, value in tree.items() if name not in left_out}
    return {**kept, "output": {name: value for name, value in output.items() if name in OUTPUT_KEPT}}


def _mapping(tree: dict[str, Any], name: str) -> dict[str, Any]:
    part = tree.get(name)
    if part is not None and not isinstance(part, dict):
        raise JobError(f"{name}: should be a mapping (got {part!r})", hint="write keys below it")
    return part or {}
