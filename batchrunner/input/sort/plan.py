"""Decides on the order of an attempt's rows and prepares it: sorts them, or reuses an earlier sorted copy."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyroaring import BitMap64

from batchrunner.core.errors import InputError, OutputError, ResumeError
from batchrunner.input.dataset import DatasetReader, RowReader
from batchrunner.input.files import first_line
from batchrunner.input.job_input import JobInput
from batchrunner.input.sort.decide import OrderDecision, decide_by_sample
from batchrunner.input.sort.external_sort import write_sorted
from batchrunner.input.sort.sorted_copy import SortedCopy
from batchrunner.output.run_json import check_same_run, fingerprint

log = logging.getLogger(__name__)

DISK_FACTOR = 2
"""A sort takes the bytes of the rows this many times on disk: in buckets, and in the sorted copy."""


def decide_order(
    job_input: JobInput, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
) -> OrderDecision:
    """Return the order for these rows: the job's `order`, or with `auto` by a sample. Raises InputError.

    `check_stop` is called before each row of the sample, and may raise.
    """
    asked = job_input.job.order
    if asked != "auto":
        return OrderDecision(asked, "set by the job")
    return decide_by_sample(job_input, rows, check_stop)


def prepare_order(
    job_input: JobInput,
    rows: BitMap64,
    directory: Path,
    token: str,
    check_stop: Callable[[], None],
    *,
    replace: bool = True,
) -> tuple[Path | None, OrderDecision]:
    """Decide on the order of these rows and sort them; return the path of the sorted copy and the decision.

    The path is None for input order. The copy is written to `directory`, with `token` in its name; with
    `replace` earlier copies there are deleted. `check_stop` is called now and then, and may raise to end the
    sort. Raises InputError, or OutputError where the disk has no space for it and `order` is not `auto`.
    """
    if replace:
        remove_sorted_copies(directory)
    decision = decide_order(job_input, rows, check_stop)
    if not rows:
        return None, decision
    path = None
    if decision.order != "input":
        path = directory / f"order-{token}.parquet"
        try:
            _sort(job_input, rows, decision, path, check_stop)
        except OutputError as failure:
            if job_input.job.order != "auto":
                raise
            path, decision = None, OrderDecision("input", f"{decision.order} would be better, but {failure}")
            log.warning("%s", decision)
    return path, decision


def open_order(job_input: JobInput, path: Path | None, *, leased: bool = False) -> RowReader:
    """Open a sorted copy, or the input where `path` is None; raises InputError where the copy is missing.

    `leased` is as for SortedCopy.
    """
    if path is None:
        return DatasetReader(job_input.dataset, job_input.renderer.columns)
    return SortedCopy(path, leased=leased)


def find_sorted_copy(
    job_input: JobInput, rows: BitMap64, directory: Path
) -> tuple[Path, OrderDecision] | None:
    """Return an earlier attempt's sorted copy if it has the job's order and all these rows, else None."""
    asked = job_input.job.order
    for path in directory.glob("order-*.parquet"):
        try:
            copy = SortedCopy(path)
            now = fingerprint(job_input.job, job_input.dataset.files, "")
            check_same_run(copy.about["fingerprint"], now, directory, model_known=False)
        except (InputError, ResumeError):
            continue
        kind = copy.about["order"]
        if rows and kind in {"auto": {"prefix"}}.get(asked, {asked}) and not rows - copy.rows(copy.positions):
            return path, OrderDecision(kind, "sorted by an earlier attempt")
    return None


def remove_sorted_copies(directory: Path) -> None:
    """Delete the sorted copies of earlier attempts, finished or not. Raises OSError."""
    for path in directory.glob("*order-*"):  # also hidden files, which are not whole
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sort(
    job_input: JobInput, rows: BitMap64, decision: OrderDecision, path: Path, check_stop: Callable[[], None]
) -> None:
    began = time.monotonic()
    where, free = path.parent, shutil.disk_usage(path.parent).free
    size = job_input.dataset.bytes_of(job_input.renderer.columns)
    needed = int(DISK_FACTOR * size * len(rows) / job_input.dataset.total_rows)  # an estimate
    takes = f"that takes about {needed >> 20} MiB there, {free >> 20} MiB are free"
    if needed > free and job_input.job.order == "auto":  # a user who sets the order may know better
        raise OutputError(
            f"{where}: not enough space to sort: {takes}",
            hint=f"free some, or set order: {decision.order} to try",
        )
    log.info("sorting %d rows", len(rows))
    run = fingerprint(job_input.job, job_input.dataset.files, "")
    try:
        write_sorted(job_input, rows, path, {"order": decision.order, "fingerprint": run}, check_stop)
    except (OSError, pa.ArrowException) as failure:
        raise OutputError(
            f"{where}: {len(rows)} rows could not be sorted ({first_line(failure)}): {takes}",
            hint="free some, or set order: input",
        ) from None
    log.info("sorted in %.0f s (%d MiB)", time.monotonic() - began, path.stat().st_size >> 20)
