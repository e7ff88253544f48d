"""`stream` sends rows as they come and gives each as it ends, in bounded memory, with nothing left behind."""

import asyncio
import gc
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, nullcontext
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import batchrunner
from batchrunner.core.errors import BatchrunError, EngineStartError
from tests.conftest import INSTANT, ROOT, ended, eventually
from tests.support.answers import vector_for
from tests.support.fake_sglang import FakeSGLang

TEXT = {"text": "text"}
"""A prompt without a chat template: the server sees the texts as they are."""


async def all_of(rows: Any, **options: Any) -> list[dict[str, Any]]:
    """Return all rows of a stream, in the order of the input."""
    return sorted([row async for row in batchrunner.stream(rows, **options)], key=lambda row: row["row"])


def test_a_plain_loop(server: FakeSGLang, scratch: Path) -> None:
    """A program without an event loop writes `for`; leaving it ends the requests in flight."""
    server.script = lambda sent: "hold" if sent.prompt == "2" else "answer"
    options: dict[str, Any] = {"prompt": TEXT, "engine": server.url}
    assert sorted(row["row"] for row in batchrunner.stream(["a", "b"], **options)) == [0, 1]
    rows = iter(batchrunner.stream(map(str, range(5)), **options))
    assert next(rows)["error"] is None
    rows.close()  # type: ignore[attr-defined]
    assert list(scratch.iterdir()) == []
    with pytest.raises(EngineStartError):
        list(batchrunner.stream(["a"], engine="http://127.0.0.1:1", limits={"engine_wait": 0.2}))


async def collect(values: list[Any], column: str, *args: Any, **options: Any) -> None:
    """Collect the values of a column as they come, of a stream that may fail."""
    async for row in batchrunner.stream(*args, **options):
        values.append(row[column])  # noqa: PERF401 - those before a failure too


async def later(rows: Iterable[Any]) -> AsyncIterator[Any]:
    """Give rows as an asynchronous iterator does."""
    for row in rows:
        yield row


Way = Callable[[Iterator[Any]], Any]
WAYS = pytest.mark.parametrize("way", [iter, later])
"""A program gives its rows as an iterator, or as an asynchronous one."""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of temporary files, which is empty."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


# --- rows ---


async def test_a_row_has_the_columns_of_a_result(server: FakeSGLang, scratch: Path) -> None:
    """A row is a dict with its number, its carried columns and the columns of a result; no file is left."""
    rows = await all_of(["a", "b"], prompt=TEXT, engine=server.url, columns=["text"])
    assert list(scratch.iterdir()) == []
    table = batchrunner.generate(["a", "b"], prompt=TEXT, engine=INSTANT, columns=["text"])
    assert [list(row) for row in rows] == [table.column_names] * 2
    assert [(row["row"], row["text"], row["output"]) for row in rows] == [
        (0, "a", "answer 0 to a"),
        (1, "b", "answer 0 to b"),
    ]


async def test_rows_come_as_they_end(server: FakeSGLang) -> None:
    """A row that takes long holds no other one up."""
    server.script = lambda sent: "hold" if sent.prompt == "slow" else "answer"
    came = []
    async for row in batchrunner.stream(["slow", "quick", "quicker"], prompt=TEXT, engine=server.url):
        came.append(row["row"])
        if len(came) == 2:
            server.answer_held()
    assert sorted(came[:2]) == [1, 2]
    assert came[2] == 0


async def test_rows_are_ordered_by_their_prefixes(server: FakeSGLang) -> None:
    """Questions about documents come one document after the other: one of each is sent first."""
    rows = [f"document {number} {'.' * 600} {question}" for number in range(40) for question in "abcdef"]
    stream = batchrunner.stream(rows, prompt={"text": "{{ text }}"}, engine=server.url)
    assert len([row async for row in stream]) == len(rows)
    firsts = [prompt.split()[1] for prompt in server.prompts if prompt.endswith(" a")]
    assert len({prompt.split()[1] for prompt in server.prompts[:40]}) > 20, firsts


async def test_an_iterator_that_blocks_holds_nothing_up() -> None:
    """It is read in a thread: the event loop goes on while it waits for an answer to make the next row of."""
    answers: queue.Queue[str | None] = queue.Queue()
    answers.put("first")
    came = []
    async for row in batchrunner.stream(iter(answers.get, None), engine=INSTANT):
        came.append(row["row"])
        answers.put(row["output"] if len(came) < 20 else None)
    assert came == list(range(20))


@WAYS
async def test_a_slow_program_slows_the_reading(way: Way) -> None:
    """An endless iterator is read a little ahead of what the program takes, and no further."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"text {read}"

    async with aclosing(batchrunner.stream(way(endless()), engine=INSTANT)) as rows:
        for taken in (10, 3010):
            for _ in range(taken - 10 or 10):
                await anext(rows)
            before = -1
            while before != read:  # until nothing is read any more
                before = read
                await asyncio.sleep(0.5)
            assert taken <= read < taken + 8000


# --- rows that are not like the others ---


@WAYS
async def test_columns_and_types_may_change(way: Way) -> None:
    """A program's rows need not have one type; a column that is missing is null."""
    rows = [{"text": "a", "x": 1}, {"text": "b", "x": "one"}, {"text": "c"}, {"x": 2.5, "text": "d"}]
    came = await all_of(way(iter(rows)), prompt=TEXT, engine=INSTANT, columns=["x"])
    assert [row["x"] for row in came] == [1, "one", None, 2.5]
    assert [row["error"] for row in came] == [None] * 4


VALUES: list[list[Any]] = [
    [1, 2.5], [{"a": 1}, {"b": 2}], [{"a": 1}, {"a": None}, {"a": 0.5}], [[1], [2.5], []],
    [Decimal("1.5"), Decimal("1.25")], [date(2026, 1, 2), time(1, 2)],
    ["one", 1, None, True, {"a": "x"}, ["x"], 1 << 62],
]  # fmt: skip
"""Values that a column of Arrow would turn into each other's type, or cannot hold together."""


@WAYS
@pytest.mark.parametrize("values", VALUES)
async def test_a_row_s_values_are_its_own(way: Way, values: list[Any], server: FakeSGLang) -> None:
    """Rows that wait together are sent, and given back, as each is alone."""
    values = values * 3
    prompt = {"text": "{{ {'v': v} | tojson }}"}
    rows = [{"v": value} for value in values]
    came = await all_of(way(iter(rows)), prompt=prompt, engine=server.url, columns=["v"])
    assert [row["error"] for row in came] == [None] * len(values)
    assert [repr(row["v"]) for row in came] == [*map(repr, values)]
    assert sorted(server.prompts) == sorted(json.dumps({"v": value}, default=str) for value in values)


@WAYS
async def test_a_row_s_values_do_not_fail_another(way: Way) -> None:
    """A text beside bytes fails the row of bytes only; a null in a column of numbers takes the default."""
    rows: list[dict[str, Any]] = [{"text": text} for text in ("a", b"\xff", "c")]
    came = await all_of(way(iter(rows)), prompt="{{ text }}", engine=INSTANT)
    assert [row["error"] is None for row in came] == [True, False, True]
    assert "holds bytes" in came[1]["error"]
    sampling = {"max_new_tokens": {"column": "n"}}
    rows = [{"text": "a", "n": n} for n in (None, 3, "three", None, 4)]
    came = await all_of(way(iter(rows)), prompt=TEXT, engine=INSTANT, sampling=sampling)
    assert [row["error"] is None for row in came] == [True, True, False, True, True]
    assert [came[at]["completion_tokens"] for at in (1, 4)] == [3, 4]


async def test_a_bad_row_ends_no_stream() -> None:
    """A value that cannot be held, sent or rendered fails its row, by name, and no other."""
    rows: list[dict[str, Any] | str | None] = [
        "good", {"text": 10**30}, {"text": 7}, {"text": None}, {"other": "x"}, None, {},
        {"text": "\ud800"}, "good",
    ]  # fmt: skip
    came = await all_of(rows, prompt=TEXT, engine=INSTANT, columns=["text"])
    assert [row["row"] for row in came] == list(range(9))
    assert [row["row"] for row in came if row["error"] is None] == [0, 8]
    assert "column 'text'" in came[1]["error"]
    assert "must hold texts (got int64)" in came[2]["error"]
    assert came[1]["text"] is None

    async def slow() -> AsyncIterator[Any]:
        yield {"text": 10**30}
        await asyncio.sleep(0.1)
        yield "good"

    came = await all_of(slow(), prompt=TEXT, engine=INSTANT)
    assert {row["row"]: row["error"] is None for row in came} == {0: False, 1: True}


async def test_a_program_may_use_its_mapping_again() -> None:
    """The row is what the mapping held when it was given."""

    def rows() -> Iterator[dict[str, int]]:
        row = {}
        for row["i"] in range(100):
            yield row

    came = await all_of(rows(), prompt="{{ i }}", engine=INSTANT, columns=["i"])
    assert [(row["row"], row["i"]) for row in came] == [(i, i) for i in range(100)]


async def test_nothing_gives_nothing() -> None:
    """A stream of no rows ends at once; no engine is opened for it."""
    assert await all_of([], prompt="x", engine="http://127.0.0.1:9") == []


# --- ends ---


def failing() -> Iterator[str]:
    """Give 300 rows and fail."""
    yield from map(str, range(300))
    raise KeyError("mine")


@WAYS
async def test_an_iterator_s_error_is_its_own(way: Way, server: FakeSGLang) -> None:
    """What the program's iterator raises comes as it is, after the answers to what it gave."""
    came: list[int] = []
    with pytest.raises(KeyError, match="mine"):
        await collect(came, "row", way(failing()), prompt=TEXT, engine=server.url)
    assert sorted(came) == list(range(300))


class Producer:
    """An iterator of rows that notices its end."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def rows(self) -> Iterator[str]:
        try:
            yield from map(str, range(10_000))
        finally:
            self.closed.set()

    async def rows_later(self) -> AsyncIterator[str]:
        try:
            for row in self.rows():
                yield row
        finally:
            self.closed.set()


async def leave(server: FakeSGLang, data: Any, how: str) -> None:
    """Leave a stream while requests are in flight."""
    server.script = lambda sent: "answer" if sent.prompt == "0" else "hold"

    async def use() -> None:
        async for _ in batchrunner.stream(data, prompt=TEXT, engine=server.url):
            await asyncio.to_thread(server.wait_for, 5)
            if how == "break":
                break
            if how == "error":
                raise ZeroDivisionError

    using = asyncio.create_task(use())
    if how == "cancel":
        await asyncio.to_thread(server.wait_for, 5)
        using.cancel()
    expected = {"cancel": asyncio.CancelledError, "error": ZeroDivisionError}
    with pytest.raises(expected[how]) if how in expected else nullcontext():
        await using
    del using
    gc.collect()  # an error's traceback holds the generator


@pytest.mark.parametrize("way", [Producer.rows, Producer.rows_later])
@pytest.mark.parametrize("how", ["break", "cancel", "error"])
async def test_leaving_the_loop_ends_everything(
    how: str, way: Callable[[Producer], Any], server: FakeSGLang, scratch: Path
) -> None:
    """Whoever leaves the loop leaves no request, no thread, no file and no open iterator behind."""
    before = set(threading.enumerate())
    producer = Producer()
    await leave(server, way(producer), how)
    for holds in (
        lambda: not list(scratch.iterdir()),
        producer.closed.is_set,
        lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("batchrunner")],
    ):
        await asyncio.to_thread(eventually, holds)
    await asyncio.to_thread(server.wait_until_left)
    sent = len(server.sent)
    server.answer_held()
    await asyncio.sleep(0.2)
    assert len(server.sent) == sent  # nothing is sent any more


async def test_an_iterator_that_blocks_is_not_waited_for() -> None:
    """A stream is closed while its iterator waits for something that never comes."""
    never = threading.Event()

    def rows() -> Iterator[str]:
        yield "a"
        never.wait()

    async with aclosing(batchrunner.stream(rows(), engine=INSTANT)) as came:
        assert (await anext(came))["row"] == 0
    never.set()


async def test_a_stream_that_fails_altogether(server: FakeSGLang) -> None:
    """Where most rows fail, the stream ends with an error that says so, as a run does."""
    server.script = lambda _: "too long"
    came: list[str | None] = []
    with pytest.raises(BatchrunError, match=r"limits.abort_failed_share.*the stream ended after"):
        await collect(came, "error", map(str, range(5000)), prompt=TEXT, engine=server.url)
    assert 100 <= len(came) < 5000
    assert None not in came


async def test_a_pause_after_a_refusal(server: FakeSGLang) -> None:
    """While the consumer pauses nothing is sent: that is no time in which the engine takes no row."""
    server.script = lambda sent: "busy 503" if sent.prompt == "row 10" and sent.tries < 3 else "answer"
    server.refusal_s = 0.5  # it comes when all others wait to be given
    options: dict[str, Any] = {"engine": server.url, "limits": {"engine_wait": 4.5}}
    async with aclosing(batchrunner.stream((f"row {i}" for i in range(300)), prompt=TEXT, **options)) as rows:
        seen = [(await anext(rows))["row"]]
        await asyncio.sleep(5.5)  # longer than refusal and limits.engine_wait
        server.refusal_s, server.delay_s = 0.0, 0.2  # the next refusal comes before any answer
        seen += [row["row"] async for row in rows]
    assert sorted(seen) == list(range(300))


# --- engines, progress ---


async def test_an_open_engine_stays_open(server: FakeSGLang) -> None:
    """Several streams, one after the other and at once, share an engine that was opened once."""
    with batchrunner.open_engine(server.url) as engine:
        async with aclosing(batchrunner.stream(map(str, range(500)), prompt=TEXT, engine=engine)) as rows:
            await anext(rows)
        both = await asyncio.gather(*(all_of(["a", "b"], prompt=TEXT, engine=engine) for _ in range(2)))
        assert [len(rows) for rows in both] == [2, 2]
        assert batchrunner.generate(["a"], prompt=TEXT, engine=engine).num_rows == 1
    with pytest.raises(BatchrunError, match="the engine is closed"):
        await all_of(["a"], engine=engine)


async def test_the_engine_is_closed_right_after_the_loop(server: FakeSGLang) -> None:
    """Leaving loop and engine at once ends the stream, though the event loop had no turn for it."""
    server.script = lambda sent: "answer" if sent.prompt == "0" else "hold"
    with batchrunner.open_engine(server.url) as engine:
        rows = batchrunner.stream(map(str, range(1000)), prompt=TEXT, engine=engine)
        assert (await anext(rows))["row"] == 0
    with pytest.raises(BatchrunError, match="the engine is closed"):
        await anext(rows)
    with batchrunner.open_engine(server.url) as engine:
        waiting = asyncio.create_task(all_of(map(str, range(1, 9)), prompt=TEXT, engine=engine))
        table = asyncio.create_task(batchrunner.agenerate(["9"], prompt=TEXT, engine=engine))
        await asyncio.to_thread(server.wait_for, len(server.sent) + 9)
    for call in (waiting, table):
        with pytest.raises(BatchrunError, match="the engine is closed"):
            await call


async def test_progress() -> None:
    """The total is told where it is known."""
    told: list[batchrunner.Progress] = []
    await all_of(["a", "b"], engine=INSTANT, on_progress=told.append, task_options=None)
    assert (told[-1].rows_done, told[-1].rows_total) == (2, 2)
    await all_of(iter(["a", "b"]), engine=INSTANT, on_progress=told.append)
    assert (told[-1].rows_done, told[-1].rows_total, told[-1].eta_s) == (2, None, None)


# --- tasks without decoding, with the columns of each; and memory ---

EVERY = {"row", "prompt_tokens", "cached_tokens", "latency_s", "attempts", "error"}
TEXTS = [f"text {n}" for n in range(6)]


async def test_vectors_are_lists() -> None:
    """Those of a server, also in 16 bits."""
    with FakeSGLang(arguments={"is_generation": False}) as server:
        call: dict[str, Any] = {"task": "embed", "task_options": {"dtype": "float16"}, "engine": server.url}
        found = await all_of([*TEXTS, ""], **call)
        assert len(server.sent) == len(TEXTS)
    assert [row["embedding"] for row in found] == [*map(vector_for, TEXTS), None]
    assert {*found[0]} == {*found[-1]} == {*EVERY, "embedding"}
    assert found[-1]["error"]


async def test_options_of_each_task() -> None:
    """The arguments that only a task has, and rows with further columns."""
    scores = await all_of(
        TEXTS, task="score", task_options={"labels": [" yes", " no"], "softmax": True}, engine=INSTANT
    )
    assert all(sum(row["scores"]) == pytest.approx(1) for row in scores)
    choices = await all_of(TEXTS, task="score", task_options={"choices": [" a", " b"]}, engine=INSTANT)
    assert {*choices[0]} == {*EVERY, "scores", "scores_per_token", "scores_per_byte"}
    documents = [{"q": text, "d": [text, "x"]} for text in TEXTS]
    ranked = await all_of(
        documents, task="rerank", task_options={"documents": "d"}, prompt="{{ q }}", engine=INSTANT
    )
    assert [len(row["scores"]) for row in ranked] == [2] * 6
    classes = await all_of(TEXTS, task="classify", task_options={"softmax": True}, engine=INSTANT)
    assert {row["label"] for row in classes} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
    rewards = await all_of(TEXTS, task="reward", engine=INSTANT)
    assert all(isinstance(row["score"], float) for row in rewards)


@pytest.mark.parametrize(
    "call",
    [
        {"task": "embed"},
        {"task": "score", "task_options": {"choices": [" a", " b"]}},
        {"sampling": {"n": 2}},
        {"answers": ["output_ids", "logprobs"]},
    ],
)
async def test_rows_that_all_failed_have_the_same_keys(call: dict[str, Any]) -> None:
    """What a row does not have is None."""
    call = {"prompt": {"text": "text"}, "engine": INSTANT, **call}
    good, *_ = await all_of(["x"], **call)
    limits = {"max_failed_rows": "100%", "abort_failed_share": 1}
    rows = await all_of([""] * 3, **call, limits=limits)
    assert all(row["error"] for row in rows)
    assert [list(row) for row in rows] == [list(good)] * 3


ROWS, MOST_GROWTH_MIB = 40_000, 60
PROGRAM = """
import asyncio, resource, sys
import batchrunner

ROWS = int(sys.argv[1])

def most_memory_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def rows():
    for number in range(ROWS):
        yield {"text": f"{number} " + "x" * 2500}

async def main():
    ended, begin = 0, 0
    async for row in batchrunner.stream(
        rows(), prompt={"text": "text"}, engine={"kind": "simulated", "step_s": 0},
        columns=["text"], sampling={"max_new_tokens": 1},
    ):
        ended += 1
        if ended == ROWS // 10:
            begin = most_memory_mib()
    print(ended, most_memory_mib() - begin)

asyncio.run(main())
"""


def test_a_long_stream_takes_no_more_memory_than_a_short_one() -> None:
    """After the first 4,000 rows of 2.5 kB, the other 36,000 add nothing to the process."""
    done = ended(sys.executable, "-c", PROGRAM, ROWS, cwd=ROOT)
    rows, growth_mib = map(int, done.stdout.split())
    assert rows == ROWS
    assert growth_mib < MOST_GROWTH_MIB  # the rows have 100 MB together
