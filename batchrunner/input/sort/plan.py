"""Which order a start takes: the job's, or what a sample says; a sorted copy is used again where it fits."""

from __future__ import annotations

import logging
import shutil
import time
from typing import TYPE_CHECKING

import pyarrow as pa

from batchrunner.core.errors import InputError, OutputError, ResumeError
from batchrunner.input.files import first_line
from batchrunner.input.row_reader import InputOrder, SortedCopy
from batchrunner.input.sort.decide import OrderDecision, choose
from batchrunner.input.sort.external_sort import write_sorted
from batchrunner.output.resume import check_same_run, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyroaring import BitMap64

    from batchrunner.input.job_input import JobInput
    from batchrunner.input.row_reader import Order

log = logging.getLogger(__name__)

ROOM = 2
"""A sort needs the rows' size so many times on disk: once dealt out, once in order."""


def choice_for(job_input: JobInput, rows: BitMap64) -> OrderDecision:
    """Return the order that these rows are to be sent in; with `auto` a sample is read. Raises InputError."""
    asked = job_input.job.order
    return choose(job_input, rows) if asked == "auto" else OrderDecision(asked, "set by the job")


def arrange(
    job_input: JobInput, rows: BitMap64, directory: Path, token: str, look: Callable[[], None]
) -> tuple[Path | None, OrderDecision]:
    """Decide on an order for rows, and write them down in it; return where (None: the input is in order).

    `directory` is ours to write to, `token` our start's name, `look` raises what ends a long sort. Copies of
    earlier starts are removed. Raises InputError, or OutputError where there is no room to sort.
    """
    remove_copies(directory)
    choice = choice_for(job_input, rows)
    if not rows:
        return None, choice
    path = None
    if choice.order != "input":
        path = directory / f"order-{token}.parquet"
        try:
            _sort(job_input, rows, choice, path, look)
        except OutputError as failure:
            if job_input.job.order != "auto":
                raise
            path, choice = None, OrderDecision("input", f"{choice.order} would be better, but {failure}")
            log.warning("%s", choice)
    return path, choice


def order_at(job_input: JobInput, path: Path | None, *, leased: bool = False) -> Order:
    """Open an order that was decided on; raises InputError where its copy is gone."""
    if path is None:
        return InputOrder(job_input.dataset, job_input.renderer.columns)
    return SortedCopy(path, leased=leased)


def arranged_before(
    job_input: JobInput, rows: BitMap64, directory: Path
) -> tuple[Path, OrderDecision] | None:
    """Return the order that a start before has written, where it is the one asked for and has these rows."""
    asked = job_input.job.order
    for path in directory.glob("order-*.parquet"):
        try:
            copy = SortedCopy(path)
            now = fingerprint(job_input.job, job_input.dataset.files, "")
            check_same_run(copy.about["fingerprint"], now, directory, model_known=False)
        except (InputError, ResumeError):
            continue
        kind = copy.about["order"]
        if rows and kind in {"auto": {"prefix"}}.get(asked, {asked}) and not rows - copy.rows(copy.places):
            return path, OrderDecision(kind, "as the start before sorted it")
    return None


def remove_copies(directory: Path) -> None:
    """Delete what starts before have sorted, or begun to; raises OSError."""
    for path in directory.glob("*order-*"):  # hidden ones too, which are not whole
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sort(
    job_input: JobInput, rows: BitMap64, choice: OrderDecision, path: Path, look: Callable[[], None]
) -> None:
    began = time.monotonic()
    where, room, free = path.parent, _room(job_input, len(rows)), shutil.disk_usage(path.parent).free
    takes = f"that takes about {room >> 20} MiB there, {free >> 20} MiB are free"
    if room > free and job_input.job.order == "auto":  # who asks for it may know better
        raise OutputError(
            f"{where}: no room to sort: {takes}: make room, or say order: {choice.order} to try"
        )
    log.info("sorting %d rows", len(rows))
    about = {
        "order": choice.order,
        "fingerprint": fingerprint(job_input.job, job_input.dataset.files, "").as_dict(),
    }
    try:
        write_sorted(job_input, rows, path, about, look)
    except (OSError, pa.ArrowException) as failure:
        raise OutputError(
            f"{where}: {len(rows)} rows could not be sorted ({first_line(failure)}): {takes}: make room, "
            "or say order: input"
        ) from None
    log.info("sorted in %.0f s (%d MiB)", time.monotonic() - began, path.stat().st_size >> 20)


def _room(job_input: JobInput, rows: int) -> int:
    """Estimate the disk that a sort takes, by what the job reads of the input."""
    size = job_input.dataset.bytes_of(job_input.renderer.columns)
    return int(ROOM * size * rows / job_input.dataset.total_rows)
