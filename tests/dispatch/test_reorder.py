"""Rows in a window: none is lost, leaders go first, equal ones once, the longest before the end."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import EngineInfo
from batchrunner.core.types import Completion, Outcome, Request, RowRef
from batchrunner.dispatch.reorder import (
    FOLLOWERS_A_CHECK,
    LAST_ROWS,
    WINDOW_ROWS,
    OrderedRow,
    OutputLengths,
    PrimeTask,
    Reorderer,
    ReuseDistance,
    find_leaders,
)
from batchrunner.engines.simulation.scheduler import SchedulerConfig
from benchmarks.control_simulated import MAX_RUNNING
from benchmarks.order_simulated import Case, Run, input_of, planned, run
from benchmarks.prompts import Row, least_tokens
from tests.support.prompts import CARRIED, INFO, request, shared, words


class Source:
    """Rows in given batches; `unread` tells how many are still to come."""

    def __init__(
        self,
        batches: Iterable[list[Request | Outcome]],
        unread: Callable[[], int] = lambda: 100_000,
        *,
        is_shared: bool = False,
    ) -> None:
        self._batches, self._unread, self.is_shared = batches, unread, is_shared

    @property
    def unread(self) -> int:
        left: int = self._unread()
        return left

    @property
    def total(self) -> int:
        return self.unread

    def batches(self) -> Iterator[list[Request | Outcome]]:
        return iter(self._batches)

    def stop(self) -> None:
        pass


def arranger(info: EngineInfo = INFO, *, dedupe: bool = True, caches: int = 1) -> Reorderer:
    return Reorderer(ReuseDistance(info, caches), OutputLengths(), dedupe=dedupe, caches=caches)


def arranged(
    by: Reorderer, batches: Sequence[Sequence[Request | Outcome]]
) -> tuple[list[OrderedRow], list[PrimeTask], list[Outcome]]:
    """Arrange whole batches; the rows that are still to come are known exactly."""
    left = [sum(map(len, batches[end:])) for end in range(1, len(batches) + 1)]
    read = iter(left)
    items: list[Any] = []
    last = 0

    def source() -> Iterable[list[Request | Outcome]]:
        nonlocal last
        for batch in batches:
            last = next(read)
            yield list(batch)

    for found in by.reorder(Source(source(), lambda: last)):
        items += found
    return (
        [item for item in items if isinstance(item, OrderedRow)],
        [item for item in items if isinstance(item, PrimeTask)],
        [item for item in items if isinstance(item, Outcome)],
    )


def rows_of(works: Iterable[OrderedRow]) -> list[int]:
    return [work.request.ref.row for work in works]


@given(
    st.lists(st.sampled_from([words(f"p{p}", 80) for p in range(5)] + ["short", "bad"]), max_size=60),
    st.integers(1, 7),
    st.booleans(),
)
def test_every_row_goes_once(texts: list[str], batch_rows: int, dedupe: bool) -> None:
    """Each is sent once or is the twin of one that is sent; those that failed before pass through."""
    rows = [
        Outcome(RowRef(row, CARRIED, row), None, "bad", None, 0) if text == "bad" else request(row, text)
        for row, text in enumerate(texts)
    ]
    batches = [rows[at : at + batch_rows] for at in range(0, len(rows), batch_rows)]
    by = arranger(dedupe=dedupe)
    works, _, failed = arranged(by, batches)
    twins = [ref.row for work in works for ref in work.duplicates]
    assert sorted([*rows_of(works), *twins, *(outcome.ref.row for outcome in failed)]) == list(
        range(len(texts))
    )
    assert by.held == 0
    good = [text for text in texts if text != "bad"]
    assert len(works) == (len(set(good)) if dedupe else len(good))


def test_nested_beginnings_are_primed_one_inside_the_other() -> None:
    """A beginning inside another is computed in a later round: in the same one it would be computed whole."""
    system = words("system", 200)
    batch = [request(row, system + words(f"doc{row % 2}", 200) + words(str(row), 4)) for row in range(100)]
    _, primers, _ = arranged(arranger(), [batch])
    assert [primer.round for primer in primers] == [0, 1]


def test_a_window_goes_on_with_the_beginnings_of_the_one_before() -> None:
    """In a dataset with one beginning nobody leads a second time."""
    prefix = words("few-shot", 300)
    batch = [request(row, prefix + words(str(row), 4)) for row in range(3 * WINDOW_ROWS + LAST_ROWS)]
    batches = [batch[at : at + 256] for at in range(0, len(batch), 256)]
    works, primers, _ = arranged(arranger(), batches)
    assert sum(work.leader is None for work in works) == 1
    assert len(primers) == 1
    assert sorted(rows_of(works)) == list(range(len(batch)))


def test_memory_stays_bounded_while_rows_come() -> None:
    """However many rows share one beginning, only some wait."""
    prefix, by, total = words("few-shot", 300), arranger(dedupe=False), 8 * WINDOW_ROWS
    held: list[int] = []

    def batches() -> Iterator[list[Request | Outcome]]:
        for at in range(0, total, 256):
            held.append(by.held)
            yield [request(row, prefix + str(row)) for row in range(at, at + 256)]

    assert sum(map(len, by.reorder(Source(batches())))) >= total
    assert max(held) <= 2 * WINDOW_ROWS + LAST_ROWS


def test_rows_do_not_wait_for_a_source_that_waits() -> None:
    """An empty batch says that more may take long: what is there goes."""
    by = arranger()
    stream = by.reorder(Source([[request(0, "a")], [], [request(1, "b")]]))
    assert rows_of(item for item in next(stream) if isinstance(item, OrderedRow)) == [0]
    assert rows_of(item for items in stream for item in items if isinstance(item, OrderedRow)) == [1]


def test_the_longest_go_first_at_the_end() -> None:
    """The last rows go longest output first; rows before them go in their own order."""
    many = [request(row, f"p{row}", max_new_tokens=row + 1) for row in range(3 * LAST_ROWS)]
    works, _, _ = arranged(arranger(), [many[at : at + 256] for at in range(0, len(many), 256)])
    assert rows_of(works)[:WINDOW_ROWS] == list(range(WINDOW_ROWS))
    end = rows_of(works)[-LAST_ROWS:]
    assert end == sorted(end, reverse=True)


def test_a_long_row_goes_early_with_its_group() -> None:
    """Also where rows begin alike."""
    groups = [
        request(row, f"{words(str(row // 8), 400)} {row:03}", max_new_tokens=500 if row == 77 else 5)
        for row in range(80)
    ]
    works, _, _ = arranged(arranger(), [groups])
    assert rows_of(works).index(77) < 4


def test_what_kinds_of_rows_have_had_tells_how_long_they_will_be() -> None:
    """Rows with one limit whose prefix had long outputs before go first at the end."""
    by = Reorderer(None, OutputLengths(), dedupe=False)
    kinds = {kind: words(kind, 60) for kind in ("short", "long")}
    batch = [
        request(row, kinds["long" if row % 2 else "short"] + words(str(row), 300), max_new_tokens=500)
        for row in range(44)
    ]
    works, _, _ = arranged(by, [batch[:40]])
    assert rows_of(works) == list(range(40))
    for work in works:
        length = 90 if work.request.ref.row % 2 else 3
        by.record(work, Completion(["x"], ["stop"], [length], 100, 0))
    works, _, _ = arranged(by, [batch[40:]])
    assert rows_of(works) == [41, 43, 40, 42]


# Equal rows


@pytest.mark.parametrize(
    ("one", "other", "twins"),
    [
        ({}, {}, 1),
        ({"temperature": 0.7}, {"temperature": 0.7}, 0),
        ({"max_new_tokens": 5}, {"max_new_tokens": 6}, 0),
        ({"json_schema": "{}"}, {}, 0),
    ],
)
def test_only_rows_that_must_get_one_answer_are_sent_once(
    one: dict[str, Any], other: dict[str, Any], twins: int
) -> None:
    """The same prompt with other sampling, or with chance in it, is another row."""
    works, _, _ = arranged(arranger(), [[request(0, "p", **one), request(1, "p", **other)]])
    assert sum(len(work.duplicates) for work in works) == twins


# Which row follows which, and when


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=30))
def test_each_row_follows_one_that_shares_the_most_with_it(codes: list[str]) -> None:
    """Leaders first, what is computed is what the tree of all prompts holds; nobody waits for many others."""
    prefixes = ["".join(letter * 512 for letter in code).encode() for code in codes]
    places = find_leaders(prefixes)
    assert sum(place.shared_bytes for place in places.values()) == shared(prefixes)
    for index in range(len(prefixes)):
        steps, at = 0, index
        while at in places:
            steps, at = steps + 1, places[at].leader
        assert 2**steps <= len(prefixes)


def test_short_beginnings_make_no_families() -> None:
    """A template of a line is not worth an order."""
    assert find_leaders([b"Summarise: " + str(row).encode() * 100 for row in range(50)]) == {}


SMALL_POOL = 20_000
"""Tokens: less than what 128 rows of 284 tokens need, and two and a half prefill passes."""


@pytest.mark.parametrize(
    ("workload", "rows", "kv_tokens", "max_running"),
    [
        ("small groups, short prompts", 600, SMALL_POOL, 128),
        ("small groups, short prompts", 6000, SMALL_POOL, 128),
        ("nested", 1000, 60_000, 4096),
    ],
)
def test_followers_find_their_prefix_in_a_small_pool(
    workload: str, rows: int, kv_tokens: int, max_running: int
) -> None:
    """Hardly more is computed than must be: eight rows to a prefix, and documents below a system prompt.

    All of them are among the last rows of the input: their leaders do not all go ahead, since their prefixes
    would be evicted, and single misses do not widen the distance. What a row brought in is used soon.
    """
    found = run(Case(workload, rows, kv_tokens, "runner", max_running=max_running))
    assert found["ratio_to_least"] < 1.1
    assert found["retractions"] == 0


@pytest.mark.parametrize(
    ("workload", "kv_tokens"),
    [("pairs of texts", 60_000), ("skewed prefixes", 40_000), ("growing traces", 100_000)],
)
def test_the_order_is_never_worse_than_the_input(workload: str, kv_tokens: int) -> None:
    """Many rows of each of a few prefixes go in turn: else the last one is evicted before its rows come."""
    sent, as_it_stands = (
        run(Case(workload, 1296, kv_tokens, arm))["ratio_to_least"] for arm in ("runner", "input")
    )
    assert sent <= min(1.05, as_it_stands)


@pytest.mark.parametrize("ordered", [planned, list])
def test_prefixes_as_long_as_the_pool_are_used_before_the_next(
    ordered: Callable[[list[Row]], list[Row]],
) -> None:
    """Conversations of 9,000 tokens on average: sorted, and as they stand, in three windows of 32 MB.

    Sorted they are computed once, as they stand once in each window: prefixes sent in the window before are
    gone by now, and nothing follows them.
    """
    rows = ordered(input_of("long traces", 2400))
    sent = Run(rows, SchedulerConfig(MAX_RUNNING, 40_000))
    sent.run()
    assert sent.uncached_tokens / least_tokens(rows) < (1.25 if ordered is planned else 4)


# The distance corrects itself


TIGHT = EngineInfo(kind="test", model="m", max_total_tokens=20_000, prefill_tokens=8192)
"""Its pool has no room for the beginnings of a whole pass: nobody knows what distance is best."""


def follow(lead: ReuseDistance, *, missed: int, computed_before: bool = False) -> list[str]:
    """Tell a lead of followers with 400 shared tokens, some of which missed them; return what it says."""
    parent = OrderedRow(request(0, "x"), prefix_ready_at=1.0 if computed_before else 3.0)
    reasons = []
    for row in range(FOLLOWERS_A_CHECK):
        work = OrderedRow(request(row, "x"), prompt_bytes=2000, leader=parent, shared_bytes=1600, sent_at=2.0)
        change = lead.record(work, Completion(["x"], ["stop"], [1], 500, 0 if row < missed else 390))
        reasons += [change.reason] if change else []
    return reasons


def test_followers_less_than_a_pass_behind_come_too_early() -> None:
    """Their beginning was not there, nor known to be computed: the distance widens, within the pool."""
    lead = ReuseDistance(TIGHT, 1)
    before = lead.tokens
    assert follow(lead, missed=20) == ["20 of 32 followers did not find their prefix in the cache"]
    assert before < lead.tokens <= 0.4 * 20_000


def test_followers_that_come_too_late_narrow_the_distance() -> None:
    """Their beginning had been computed, and is gone."""
    lead = ReuseDistance(INFO, 1)
    before = lead.tokens
    assert follow(lead, missed=20, computed_before=True)
    assert 0 < lead.tokens < before
