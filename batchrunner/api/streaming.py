"""The library call `stream`, which yields each row as soon as the row has its answer."""

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from typing import Any, Unpack

from batchrunner.api.runs import engine_of
from batchrunner.core.errors import JobError
from batchrunner.core.loop_thread import LoopThread
from batchrunner.input.tables import Data, Row, paths_of
from batchrunner.job.call import CallOptions, LibraryCall
from batchrunner.job.load import EngineLike
from batchrunner.job.tasks import GENERATE
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.progress import ProgressListener, make_displays
from batchrunner.runner.stream import StreamCall


class Stream(AsyncIterator[dict[str, Any]]):
    """The result rows of one call of `stream`, for `async for` or a plain `for`."""

    def __init__(self, call: StreamCall) -> None:
        self._rows = call.rows()

    async def __anext__(self) -> dict[str, Any]:
        return await anext(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A plain `for` needs an event loop of its own, in another thread.
        async def next_row() -> dict[str, Any] | None:
            # None marks the end.
            return await anext(self._rows, None)

        with LoopThread() as loop:
            try:
                while row := loop.call(next_row):
                    yield row
            finally:
                loop.call(self.aclose)

    async def aclose(self) -> None:
        """Cancel the requests in flight and close the engine, unless it comes from `open_engine`."""
        await self._rows.aclose()


def stream(
    rows: Data | AsyncIterable[Row],
    *,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    progress: bool = False,
    on_progress: ProgressListener | None = None,
    **call: Unpack[CallOptions],
) -> Stream:
    """Send rows as they arrive and yield each as it finishes, as a dict with the columns of a result row.

    Example: `for row in batchrunner.stream(texts, engine="Qwen/Qwen3-8B"): print(row["output"])`.

    In a program with an event loop use `async for`, because a plain `for` blocks the loop. The arguments are
    those of `generate`, except that `rows` may also be an asynchronous iterator, but not the path of files.
    An iterator may be endless. A plain iterator is read in a thread, an asynchronous one in the running loop.
    A few thousand rows are read ahead; then reading pauses until the program takes more results. The first
    row defines the columns; later rows may have other types. Among the rows that wait (at most 512), one row
    of each shared prefix is sent first. The column `row` of a result is the row's position in the input.

    `task` is the task of a job, such as "embed"; `task_options` are the arguments that only `embed`, `score`
    or `rerank` have.

    Leaving the loop, closing the generator or cancelling the task cancels the requests in flight. It also
    closes the engine, unless the engine comes from `open_engine`. Raises BatchrunError. If the iterator
    `rows` raises an exception, the results of the rows before it come first, then the exception.
    """
    open_engine, spec = engine_of(engine)
    if open_engine is not None:
        open_engine.refuse_other_task(call.get("task", GENERATE))
    if paths_of(rows) is not None:
        raise JobError("rows: stream does not read files", hint="give pyarrow.dataset.dataset(path)")
    library_call = LibraryCall(engine=spec, columns=columns, own_rows=True, **call)
    displays = make_displays(progress=progress, on_progress=on_progress)
    return Stream(StreamCall(rows, library_call, open_engine, displays))
