"""Generated answers for all rows, as a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchrunner.api.engine import engine_of
from batchrunner.api.results import results_of
from batchrunner.input.tables import Data, paths_of
from batchrunner.job.call import GenerateCall
from batchrunner.job.load import EngineLike
from batchrunner.job.spec import LimitsSpec, OnLength
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.progress_calls import ProgressListener, make_displays


def generate(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    parse: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    sampling: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    answers: Sequence[str] = (),
    explode: bool = False,
    check: Mapping[str, Any] | None = None,
    on_length: OnLength | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Send every row and return the results as a pyarrow Table in input order.

    `rows` are texts (which become the column `text`), mappings, or a mix, as a list or any iterable; a table
    or data frame (of pyarrow, pandas, polars or duckdb, or any other that speaks Arrow's C interface); a data
    set of pyarrow or Hugging Face; or the path of a file, a directory or a glob. An iterator or a data set is
    read in bounded memory; the results are in memory.

    `prompt` is the user template, the `prompt` part of a job, or a function that makes the prompt of a row;
    without it the only text column is the prompt. `parse` is a function that makes columns of an answer, or
    the `parse` part of a job. Functions run in processes of their own. `engine` is an open engine, the
    `engine` part of a job, a model's name or directory (a server is started), the address of a server or a
    list of addresses, or "simulated". `columns` are carried into the result, whose other columns are those
    of a result row (`row`, `output`, `finish_reason`, …, `error`), and those of `answers` (`output.columns`
    of a job, such as "logprobs"). With `explode` each output of a row is a row, where `sampling` has `n`.
    `check` and `on_length` are those of a job: which answers are good.
    `progress` and `on_progress` are as for `run`.

    Failed rows have an `error`; the table always has as many rows as the input. Raises BatchrunError, and
    what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    opened, spec = engine_of(engine)
    call = GenerateCall(
        engine=spec,
        prompt=prompt,
        columns=columns,
        limits=limits,
        parse=parse,
        sampling=sampling,
        answers=answers,
        explode=explode,
        check=check,
        on_length=on_length,
        own_rows=paths_of(rows) is None,
    )
    return results_of(rows, call, opened, display)
