"""The simulated scheduler: who is admitted, cached, sent back, and that every sample ends exactly once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.engines.simulation.radix import RadixCache
from batchrunner.engines.simulation.request import SchedulerConfig, SimulatedRequest
from batchrunner.engines.simulation.scheduler import Scheduler
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchrunner.engines.simulation.scheduler import StepResult

NO_LIMIT = 1_000_000


def make(max_running: int = 256, max_total_tokens: int = 100_000, **config: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(max_running, max_total_tokens, **config))


def submit(scheduler: Scheduler, samples: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    found = list(samples)
    for sample in found:
        scheduler.submit(sample)
    return found


def run(scheduler: Scheduler, later: Iterable[SimulatedRequest] = ()) -> list[StepResult]:
    """Step until nothing is left; each sample that ends brings the next of `later`."""
    waiting = iter(later)
    steps = []
    while (step := scheduler.step()) is not None:
        steps.append(step)
        for _ in step.finished:
            submit(scheduler, (sample for sample in [next(waiting, None)] if sample is not None))
    return steps


def step(scheduler: Scheduler, limit: int = 1) -> StepResult:
    found = scheduler.step(limit)
    assert found is not None
    return found


# One sample, and a few


def test_one_sample_is_prefilled_and_then_decodes_the_rest() -> None:
    """The prefill puts out the first token, each decode pass one more."""
    scheduler = make()
    [sample] = submit(scheduler, [SimulatedRequest(10, 5)])
    prefill, decode = run(scheduler)
    assert (prefill.kind, prefill.prefill_tokens, prefill.admitted, prefill.running) == ("prefill", 10, 1, 0)
    assert (decode.kind, decode.steps, decode.running, decode.finished) == ("decode", 4, 1, [sample])
    assert decode.used_tokens == 10 + 4
    assert decode.kv_tokens == 10 + (1 + 2 + 3 + 4) / 4
    assert (sample.state, sample.outputs) == ("finished", 5)
    assert (scheduler.pool.used_tokens, scheduler.in_flight) == (0, 0)


def test_passes_are_the_same_in_one_go_or_one_by_one() -> None:
    """Skipping over passes in which nothing happens changes nothing."""

    def totals(limit: int) -> tuple[Any, ...]:
        made = random.Random(7)
        scheduler = make(20, 3000)
        rows = [SimulatedRequest(made.randint(5, 60), made.randint(1, 90), 100) for _ in range(150)]
        submit(scheduler, rows)
        kv_tokens = 0.0
        while (found := scheduler.step(limit)) is not None:
            kv_tokens += found.kv_tokens * found.steps
        ended = [(row.state, row.outputs, row.retractions) for row in rows]
        return (scheduler.decode_passes, scheduler.prefill_passes, scheduler.retractions, kv_tokens, ended)

    assert totals(1) == totals(NO_LIMIT) == totals(3)


def test_prefill_goes_first() -> None:
    """What arrives between two decode passes is prefilled by the next one."""
    scheduler = make()
    submit(scheduler, [SimulatedRequest(10, 50)])
    assert [step(scheduler).kind for _ in range(3)] == ["prefill", "decode", "decode"]
    submit(scheduler, [SimulatedRequest(10, 50)])
    assert [step(scheduler).kind for _ in range(2)] == ["prefill", "decode"]
    assert scheduler.running == 2


# Admission


def test_no_more_run_than_may() -> None:
    """A full batch admits nobody until somebody leaves."""
    scheduler = make(max_running=3)
    submit(scheduler, [SimulatedRequest(10, 5 + i) for i in range(5)])
    assert (step(scheduler).admitted, scheduler.queue) == (3, 2)
    first_end = step(scheduler, NO_LIMIT)
    assert (first_end.steps, len(first_end.finished)) == (4, 1)
    assert (step(scheduler).admitted, scheduler.running, scheduler.queue) == (1, 3, 1)


def test_a_fixed_length_is_reserved_whole() -> None:
    """With ignore_eos the rest of each output is kept free, however small the ratio became."""
    scheduler = make(max_total_tokens=1000, conservativeness=0.01)
    submit(scheduler, [SimulatedRequest(10, 200, ignore_eos=True) for _ in range(9)])
    assert step(scheduler).admitted == 4  # 4 · 211 tokens, and a fifth would not fit
    assert {s.retractions for f in run(scheduler) for s in f.finished} == {0}


def test_a_ratio_of_the_outputs_is_reserved() -> None:
    """In one pass each sample counts in full; the next pass counts the running ones at the ratio."""
    scheduler = make(max_total_tokens=1000)
    submit(scheduler, [SimulatedRequest(10, 200) for _ in range(9)])
    assert step(scheduler).admitted == 4
    expected_tokens = 4 * (200 - 1 - 100) * (0.7 - 100 * (0.7 - 0.098) / 600)
    assert step(scheduler, 100).steps == 100
    submit(scheduler, [])
    assert scheduler.ratio == pytest.approx(0.7 - 100 * (0.7 - 0.098) / 600)
    assert 1000 - scheduler.pool.used_tokens - expected_tokens > 211  # there is room by now,
    assert step(scheduler).kind == "decode"  # but nobody looks before the batch shrinks


def test_the_head_of_the_queue_blocks_the_others() -> None:
    """A sample that does not fit is not overtaken by one that would."""
    scheduler = make(max_total_tokens=1000)
    _, large, small = submit(
        scheduler, [SimulatedRequest(10, 600), SimulatedRequest(10, 500), SimulatedRequest(10, 5)]
    )
    assert step(scheduler).admitted == 1
    assert [large.state, small.state] == ["waiting", "waiting"]


def test_a_pass_takes_no_more_than_a_chunk() -> None:
    """A long prompt is cut, one at a time, and others fill the rest of the last chunk."""
    scheduler = make(chunked_prefill_tokens=100)
    submit(scheduler, [SimulatedRequest(250, 5), SimulatedRequest(120, 5), SimulatedRequest(10, 5)])
    found = [step(scheduler) for _ in range(4)]
    assert [f.kind for f in found] == ["prefill"] * 4
    assert [f.prefill_tokens for f in found] == [100, 100, 100, 80]
    assert [f.admitted for f in found] == [1, 1, 2, 2]
    run(scheduler)
    assert scheduler.pool.used_tokens == 0


def test_without_chunks_a_pass_has_a_limit_too() -> None:
    """`max_prefill_tokens` bounds a pass, but never the first sample of it."""
    scheduler = make(chunked_prefill_tokens=None, max_prefill_tokens=100)
    submit(
        scheduler,
        [SimulatedRequest(250, 5), SimulatedRequest(60, 5), SimulatedRequest(30, 5), SimulatedRequest(30, 5)],
    )
    assert [step(scheduler).prefill_tokens for _ in range(3)] == [250, 90, 30]


def test_a_prompt_too_long_is_refused() -> None:
    """The server refuses it before it is queued; an output is cut to what fits."""
    scheduler = make(max_total_tokens=100)
    with pytest.raises(ValueError, match="too long"):
        scheduler.submit(SimulatedRequest(99, 1))
    [sample] = submit(scheduler, [SimulatedRequest(50, 500, 500)])
    run(scheduler)
    assert (sample.state, sample.outputs) == ("finished", 48)


# The ratio and retraction


def test_the_ratio_falls_and_starts_anew_when_idle() -> None:
    """0.7 at first, 0.14 of it after 600 decode passes, and 0.7 again after the last sample."""
    scheduler = make()
    submit(scheduler, [SimulatedRequest(10, 1000)])
    assert scheduler.ratio == 0.7
    step(scheduler)
    step(scheduler, 300)
    assert scheduler.ratio == pytest.approx((0.7 + 0.098) / 2)
    step(scheduler, 690)
    assert scheduler.ratio == pytest.approx(0.098)
    run(scheduler)
    assert scheduler.ratio == 0.7


@pytest.mark.parametrize(("conservativeness", "ratio"), [(0.5, 0.35), (1.0, 0.7), (2.0, 1.0)])
def test_conservativeness_scales_the_ratio(conservativeness: float, ratio: float) -> None:
    """The flag multiplies the first ratio, which is never above 1."""
    assert make(conservativeness=conservativeness).ratio == pytest.approx(ratio)


def optimistic(**config: Any) -> tuple[Scheduler, list[SimulatedRequest]]:
    """Return a scheduler that takes in more than fits: it expects a hundredth of the outputs."""
    scheduler = make(max_total_tokens=1000, conservativeness=0.01, **config)
    rows = [SimulatedRequest(20 + i % 3, 300, 300) for i in range(12)]
    for row in rows:  # one at a time: in one pass each would count in full
        scheduler.submit(row)
        step(scheduler)
    return scheduler, rows


def test_when_the_pool_is_full_the_shortest_output_goes_back() -> None:
    """Then the longest prompt; it comes to the queue's end with its outputs, and ends all the same."""
    scheduler, rows = optimistic()
    assert scheduler.running > 3
    while not scheduler.retractions:
        youngest_first = reversed(scheduler._batch.samples)
        order = sorted(youngest_first, key=lambda row: (row.outputs_base, -row.prompt_tokens))
        found = step(scheduler)
    assert found.retracted >= 1
    assert [row.state for row in order[: found.retracted]] == ["waiting"] * found.retracted
    assert {row.state for row in order[found.retracted :]} <= {"running", "finished"}
    assert order[0].outputs > 1
    run(scheduler)
    assert {(row.state, row.outputs) for row in rows} == {("finished", 300)}
    assert sum(row.retractions for row in rows) == scheduler.retractions
    assert scheduler.pool.used_tokens == 0


def test_a_retraction_corrects_the_ratio() -> None:
    """The new one is what the outputs have become of what was asked for, and 20 steps more."""
    scheduler, _ = optimistic()
    before = scheduler.ratio
    while not scheduler.retractions:
        step(scheduler)
    kept = scheduler.running
    outputs = scheduler._batch.output_tokens - kept  # the pass put out one more each
    assert scheduler.ratio == pytest.approx((outputs + 20 * kept) / (300 * kept + 1))
    assert scheduler.ratio > before


def test_more_conservative_means_fewer_retractions() -> None:
    """That is what the flag is for."""

    def retractions(conservativeness: float) -> int:
        made = random.Random(5)
        scheduler = make(64, 4000, conservativeness=conservativeness)
        submit(
            scheduler,
            [
                SimulatedRequest(made.randint(10, 60), min(400, int(made.expovariate(1 / 150)) + 1), 400)
                for _ in range(200)
            ],
        )
        run(scheduler)
        return scheduler.retractions

    assert retractions(0.1) > retractions(0.4) >= retractions(1.4)


# The cache


def shared(
    groups: int, each: int, head_tokens: int = 430, own_tokens: int = 32
) -> list[list[SimulatedRequest]]:
    made = random.Random(3)
    return [
        [
            SimulatedRequest(head_tokens + own_tokens, made.randint(8, 40), prefix=((f"g{g}", head_tokens),))
            for _ in range(each)
        ]
        for g in range(groups)
    ]


def test_a_prefix_is_computed_once() -> None:
    """A sibling that comes later finds it; one that is admitted in the same pass does not."""
    scheduler = make()
    first, second, third = (SimulatedRequest(100, 5, prefix=(("head", 80),)) for _ in range(3))
    submit(scheduler, [first, second])
    assert step(scheduler).prefill_tokens == 200
    assert scheduler.pool.used_tokens == 80 + 20 + 20  # what both brought in is kept once
    submit(scheduler, [third])
    assert (step(scheduler).prefill_tokens, third.cached_tokens) == (20, 80)
    run(scheduler)
    assert (scheduler.pool.used_tokens, scheduler.pool.cache.evictable_tokens) == (0, 80 + 3 * (20 + 4))


def test_without_a_cache_nothing_is_found() -> None:
    """Nor kept."""
    scheduler = make(radix_cache=False)
    submit(scheduler, [SimulatedRequest(100, 5, prefix=(("head", 80),)) for _ in range(9)])
    run(scheduler)
    assert (scheduler.cached_tokens, scheduler.pool.free_tokens) == (0, 100_000)


def test_the_order_decides_what_is_cached() -> None:
    """Sorted by prefix siblings enter one pass together; shuffled is better; leaders first is best.

    The real scheduler found 28 %, 55.6 % and 80 % of the prompt tokens in this setting.
    """

    def cached(rows: Sequence[SimulatedRequest], window: int = 600) -> float:
        scheduler = make(256, 40_000)
        submit(scheduler, rows[:window])
        run(scheduler, rows[window:])
        return scheduler.cached_tokens / (scheduler.cached_tokens + scheduler.prefilled_tokens)

    def groups() -> list[list[SimulatedRequest]]:
        return shared(120, 8)

    in_order = [row for group in groups() for row in group]
    shuffled = [row for group in groups() for row in group]
    random.Random(1).shuffle(shuffled)
    found, width = groups(), 20
    leaders = [
        row
        for at in range(0, 120, width)
        for turn in zip(*found[at : at + width], strict=True)
        for row in turn
    ]
    shares = [cached(in_order), cached(shuffled), cached(leaders)]
    assert shares == pytest.approx([0.28, 0.556, 0.80], abs=0.06)


def test_lpm_takes_the_cached_first() -> None:
    """The longest cached prefix goes first, and one of those that share an uncached one."""
    scheduler = make(max_running=1, policy="lpm")
    submit(scheduler, [SimulatedRequest(100, 5, prefix=(("known", 80),))])
    step(scheduler)
    rows = submit(
        scheduler,
        [
            SimulatedRequest(100, 5, prefix=(("new", 80),)),
            SimulatedRequest(100, 5, prefix=(("new", 80),)),
            SimulatedRequest(100, 5),
            SimulatedRequest(100, 5, prefix=(("known", 80),)),
        ],
    )
    order = [sample for found in run(scheduler) for sample in found.finished][1:]
    assert order[0] is rows[3]
    assert order[1:] == [rows[0], rows[1], rows[2]]  # once one brought it in, its sibling is a cached one


@pytest.mark.parametrize(("others", "overtakes"), [(100, True), (128, False)])
def test_lpm_gives_up_where_the_queue_is_long(others: int, overtakes: bool) -> None:
    """With more than 128 waiting, it is first come, first served."""
    scheduler = make(max_running=1, policy="lpm")
    submit(scheduler, [SimulatedRequest(100, 5, prefix=(("known", 80),))])
    step(scheduler)
    rows = submit(scheduler, [SimulatedRequest(50, 5) for _ in range(others)])
    [sibling] = submit(scheduler, [SimulatedRequest(100, 5, prefix=(("known", 80),))])
    step(scheduler, NO_LIMIT)
    step(scheduler)
    assert sibling.state == ("running" if overtakes else "waiting")
    assert rows[0].state == ("waiting" if overtakes else "running")


def test_the_least_recent_is_evicted() -> None:
    """Leaves first, then what they leave behind; never what is locked."""
    cache = RadixCache()
    paths = [(("head", 10), (name, 5)) for name in "abc"]
    nodes = [cache.insert(path, 15)[0] for path in paths]
    for node in nodes:
        cache.lock(node)
    assert cache.evictable_tokens == 0
    assert cache.evict(1) == 0
    for node in nodes[:2]:
        cache.unlock(node)
    cache.match(paths[0], 15)
    assert (cache.evictable_tokens, cache.evict(3)) == (10, 5)
    assert [cache.match(path, 15)[1] for path in paths] == [15, 10, 15]
    cache.unlock(nodes[2])
    assert cache.evict(NO_LIMIT) == 20
    assert cache.match(paths[0], 15) == (cache.root, 0)


def test_a_prefix_in_part() -> None:
    """A shorter share of the same text is found in the longer one."""
    cache = RadixCache()
    cache.insert((("text", 100), ("own", 20)), 120)
    node, matched = cache.match((("text", 40), ("other", 9)), 49)
    assert (matched, node.tokens, cache.evictable_tokens) == (40, 40, 120)
    assert cache.match((("text", 100), ("own", 20)), 119)[1] == 119


# Dropping


def test_dropped_samples_go() -> None:
    """At once while they wait or are prefilled in chunks, with the next pass while they decode."""
    scheduler = make(max_running=2, chunked_prefill_tokens=50)
    decoding, chunked, waiting = submit(
        scheduler, [SimulatedRequest(10, 50), SimulatedRequest(300, 50), SimulatedRequest(10, 50)]
    )
    step(scheduler)
    for sample in (decoding, chunked, waiting):
        scheduler.drop(sample)
        scheduler.drop(sample)
    assert (chunked.state, waiting.state, scheduler.in_flight) == ("dropped", "dropped", 1)
    [last] = run(scheduler)
    assert (last.finished, decoding.state, last.steps) == ([decoding], "dropped", 1)
    assert (scheduler.in_flight, scheduler.pool.used_tokens) == (0, 0)
    scheduler.drop(decoding)


# Invariants

rows = st.lists(
    st.tuples(
        st.integers(1, 120),  # own prompt tokens
        st.integers(0, 3),  # group, 0 for none
        st.integers(0, 60),  # outputs
        st.integers(0, 100),  # asked beyond them
        st.booleans(),  # ignore_eos
        st.integers(0, 30),  # passes until it is submitted
        st.integers(0, 300),  # passes until it is dropped, if 250 or more never
    ),
    min_size=1,
    max_size=60,
)


@examples(100)
@given(
    rows=rows,
    max_running=st.integers(1, 20),
    max_total_tokens=st.integers(300, 900),
    chunk=st.sampled_from([None, 16, 64, 4096]),
    policy=st.sampled_from(["fcfs", "lpm"]),
    conservativeness=st.sampled_from([0.01, 0.3, 1.0]),
    radix_cache=st.booleans(),
    decode_interval=st.sampled_from([0, 0, 1, 7]),
    decode_interval_samples=st.sampled_from([0, 4]),
    mixed_chunk=st.booleans(),
    clip_tokens=st.sampled_from([20, 4096]),
    limit=st.sampled_from([1, 5, NO_LIMIT]),
)
@example(  # the pool is full when the next chunk of a prompt is due
    rows=[
        (1, 0, 0, 0, False, 0, 0), (20, 1, 17, 0, False, 0, 19), (46, 1, 0, 0, False, 1, 20),
        (84, 0, 11, 0, False, 0, 19), (1, 1, 8, 0, False, 0, 19),
    ],
    max_running=4, max_total_tokens=300, chunk=16, policy="fcfs", conservativeness=0.01, radix_cache=False,
    decode_interval=0, decode_interval_samples=0, mixed_chunk=True, clip_tokens=20, limit=1,
)  # fmt: skip
def test_every_sample_ends_once_and_no_token_is_lost(
    rows: list[tuple[int, ...]], limit: int, chunk: int | None, **config: Any
) -> None:
    """Whatever comes and goes: limits are kept, sums are right, and in the end the pool is as it was."""
    scheduler = make(chunked_prefill_tokens=chunk, **config)
    coming = []
    for own, group, outputs, more, ignore_eos, arrival, leave in rows:
        prefix = ((("group", group), 40),) if group else ()
        asked = max(outputs, 1) if ignore_eos else outputs + more
        sample = SimulatedRequest(
            own + 40 * bool(group), outputs, asked, ignore_eos=bool(ignore_eos), prefix=prefix
        )
        coming.append((arrival, leave, sample))
    ended: list[SimulatedRequest] = []
    passes = 0
    while coming or scheduler.in_flight:
        for arrival, leave, sample in coming:
            if arrival <= passes and sample.state == "new":
                scheduler.submit(sample)
            if leave <= passes and leave < 250 and sample.state != "new":
                scheduler.drop(sample)
        coming = [entry for entry in coming if not entry[2].over]
        found = scheduler.step(limit)
        passes += found.steps if found else 1
        if found:
            ended += found.finished
            assert found.running <= scheduler.config.max_running
            assert found.used_tokens <= scheduler.config.max_total_tokens
            assert 1 <= found.steps <= limit
        check_sums(scheduler)
    assert len(ended) == len(set(ended))
    finished = [sample for sample in ended if sample.state == "finished"]
    assert all(sample.outputs == sample.target_tokens for sample in finished)
    assert scheduler.pool.used_tokens == 0


def check_sums(scheduler: Scheduler) -> None:
    """Compare the running sums with what they sum up."""
    batch, cache = scheduler._batch, scheduler.pool.cache
    running = list(batch.samples)
    chunked = scheduler._admission.chunked
    assert scheduler.queue == sum(
        sample.state == "waiting" for sample in scheduler._admission.waiting._samples
    )
    assert len(running) + (chunked is not None) <= scheduler.config.max_running
    assert batch.output_tokens == sum(batch.outputs_of(sample) for sample in running)
    assert batch.context_tokens == sum(batch.context_of(sample) for sample in running)
    expected = sum(
        min(sample.asked_tokens - batch.outputs_of(sample), scheduler.config.clip_tokens)
        * (1 if sample.ignore_eos else 0.5)
        for sample in running
    )
    assert batch.expected_tokens(0.5) == pytest.approx(expected)
    own_tokens = sum(batch.context_of(sample) - sample.protected_tokens for sample in running)
    own_tokens += chunked.filled_tokens - chunked.protected_tokens if chunked else 0
    nodes = [cache.root]
    for node in nodes:
        nodes += node.children.values()
    in_tree = sum(node.tokens for node in nodes)
    assert in_tree - cache.evictable_tokens == sum(node.tokens for node in nodes if node.locks)
    assert scheduler.pool.free_tokens == scheduler.config.max_total_tokens - in_tree - own_tokens


def test_long_outputs_are_expected_clipped() -> None:
    """No more than 4096 tokens are expected of a sample, until fewer are left."""
    scheduler = make(max_total_tokens=50_000)
    submit(
        scheduler, [SimulatedRequest(10, 6000, ignore_eos=True), SimulatedRequest(10, 100, ignore_eos=True)]
    )
    step(scheduler)
    assert scheduler._batch.expected_tokens(0.5) == 4096 + 99
    step(scheduler, 99)
    step(scheduler, 2000)
    assert scheduler._batch.expected_tokens(0.5) == 6000 - 1 - 99 - 2000


def test_a_smaller_clip_admits_more() -> None:
    """Rows that ask for far more than they put out are expected to take no more than the clip."""

    def first_pass(**config: Any) -> int:
        scheduler = make(max_total_tokens=10_000, **config)
        submit(scheduler, [SimulatedRequest(100, 50, 3000) for _ in range(60)])
        return step(scheduler).admitted

    assert first_pass() == 3
    assert first_pass(clip_tokens=100) == 49  # 201 tokens each, and strictly less than the pool


# Mixed chunks


def test_a_prefill_pass_decodes_too() -> None:
    """With mixed chunks running samples get a token in each prefill pass, which takes that much less."""
    scheduler = make(chunked_prefill_tokens=100, mixed_chunk=True)
    first, second = submit(scheduler, [SimulatedRequest(50, 3), SimulatedRequest(30, 9)])
    found = step(scheduler)
    assert (found.prefill_tokens, found.admitted, found.decoded) == (80, 2, 0)
    submit(scheduler, [SimulatedRequest(150, 2)])
    found = step(scheduler)
    assert (found.kind, found.prefill_tokens, found.decoded, found.running) == ("prefill", 98, 2, 2)
    assert found.kv_tokens == 98 + (50 + 30) + 2
    found = step(scheduler)
    assert (found.prefill_tokens, found.decoded, found.finished) == (52, 2, [first])
    run(scheduler)
    assert second.outputs == 9
    assert scheduler.pool.used_tokens == 0


def test_without_chunks_nothing_is_mixed() -> None:
    """The server mixes chunks; where prompts are never cut it mixes nothing."""
    scheduler = make(chunked_prefill_tokens=None, mixed_chunk=True)
    submit(scheduler, [SimulatedRequest(50, 3)])
    step(scheduler)
    submit(scheduler, [SimulatedRequest(50, 3)])
    assert step(scheduler).decoded == 0


def passes(limit: int, rows: list[tuple[int, int]], **config: Any) -> str:
    """Return the passes of a run, `P` for a prefill and `d` for a decode."""
    scheduler = Scheduler(SchedulerConfig(**{"max_running": 4, "max_total_tokens": 10_000, **config}))
    for prompt_tokens, outputs in rows:
        scheduler.submit(SimulatedRequest(prompt_tokens, outputs))
    found = ""
    while (step := scheduler.step(limit)) is not None:
        found += "P" if step.kind == "prefill" else "d" * step.steps
    return found


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "PdPdPdddd"),
        ({"decode_interval": 3}, "PdddPddd"),
        ({"decode_interval": 3, "decode_interval_samples": 4}, "PdPdPdddd"),
    ],
)
def test_a_prefill_waits_for_the_decodes_owed(limit: int, config: dict[str, int], wanted: str) -> None:
    """Rows that end meanwhile are replaced together; a batch below the least size fills at once."""
    rows = [(10, 2), (10, 3), (10, 4), (10, 5), (10, 5), (10, 5)]
    assert passes(limit, rows, **config)[: len(wanted)] == wanted


@pytest.mark.parametrize("limit", [1, 1000])
def test_chunks_of_a_prompt_wait_too(limit: int) -> None:
    """A prompt in chunks is continued after the decodes owed; with nothing to decode it is at once."""
    assert passes(limit, [(10, 9), (250, 1)], decode_interval=2, chunked_prefill_tokens=100) == "PddPddPdddd"
    assert passes(limit, [(250, 1)], decode_interval=2, chunked_prefill_tokens=100) == "PPP"


def test_fewer_and_larger_prefills() -> None:
    """The same rows in a few large prefill passes, with more decode passes."""
    rows = [(50, 20 + 37 * i % 61) for i in range(300)]
    often, seldom = (passes(1, rows, max_running=32, decode_interval=n) for n in (0, 8))
    assert seldom.count("P") < 0.5 * often.count("P")
    assert often.count("d") < seldom.count("d") < 1.5 * often.count("d")
