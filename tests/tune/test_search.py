"""The search for the fastest flags, in virtual time: what it finds, what it costs, what it never does."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrunner.core.errors import EngineStartError
from batchrunner.core.types import SchedulerLoad
from batchrunner.engines.flags import Flags
from batchrunner.tune.measure import Moment, Result, Rival, Signs, TrialWatch, tokens_at
from batchrunner.tune.outcome import Tuned, account
from batchrunner.tune.race import _quantile as quantile
from batchrunner.tune.race import compare, spread_of
from batchrunner.tune.search import Ask, Search, key_of
from batchrunner.tune.space import KNOBS, Knob, Machine, Move, Now
from batchrunner.tune.tuner import drive
from tests.support.tuning_lab import CPU, Card, Lab, chat_rows

if TYPE_CHECKING:
    from batchrunner.tune.space import Args

WRONG = {"schedule-conservativeness": 3, "max-running-requests": 8}
ROWS = chat_rows(4000)


class Kept:
    """Finished trials in memory."""

    def __init__(self) -> None:
        self.results: defaultdict[bytes, list[Result]] = defaultdict(list)

    def find(self, args: Args, turn: int) -> Result | None:
        found = self.results[key_of(args)]
        return found[turn] if turn < len(found) else None

    def add(self, args: Args, result: Result) -> None:
        self.results[key_of(args)].append(result)


def tuned(
    lab: Lab,
    args: Args = WRONG,
    *,
    machine: Machine = CPU,
    budget_s: float = 1800,
    kept: Kept | None = None,
) -> tuple[Tuned, Search]:
    search = Search(args, machine)
    spent_s = asyncio.run(drive(search, kept or Kept(), lab.run, budget_s))
    return account(search, "job.yaml", "all rows", spent_s), search


def true_speed(args: Args, **options: Any) -> float:
    """Return what a setting does without noise."""
    return Lab(ROWS, **options).measure(Ask(args, "", 0)).tokens_per_s


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
def test_wrong_flags_are_put_right(noise: float) -> None:
    """The goal in virtual time: 0.95 x the best of a grid of 24 in a quarter of the grid's time."""
    found, search = tuned(Lab(ROWS, noise=noise))
    grid = [
        {"schedule-conservativeness": care, "max-running-requests": running}
        for care in (0.1, 0.3, 1.0, 3.0)
        for running in (8, 32, 64, 128, 256, 512)
    ]
    results = [Lab(ROWS).measure(Ask(args, "", 0)) for args in grid]
    best = max(result.tokens_per_s for result in results)
    assert true_speed(search.best.args) >= 0.95 * best
    assert found.spent_s <= sum(result.cost_s for result in results) / 4


def test_good_flags_are_left_alone() -> None:
    """Where nothing is faster nothing is changed, however noisy the trials are."""
    good = {"schedule-conservativeness": 0.1, "max-running-requests": 256}
    for seed in range(8):
        found, _ = tuned(Lab(ROWS, noise=0.05, seed=seed), good)
        assert found.args == {}


@given(budget_s=st.floats(1, 700), seed=st.integers(0, 50))
@settings(max_examples=25)
def test_the_budget_holds(budget_s: float, seed: int) -> None:
    """Trials never take more than the time for them, and a setting that was not measured is not taken."""
    lab = Lab(ROWS, noise=0.05, seed=seed)
    search = Search(WRONG, CPU)
    asyncio.run(drive(search, Kept(), lab.run, budget_s))
    assert lab.spent_s <= budget_s + 0.5
    assert search.best.args == WRONG or search.best.speeds


@given(first_s=st.floats(30, 300), seed=st.integers(0, 50))
@settings(max_examples=15)
def test_a_search_goes_on_where_it_was(first_s: float, seed: int) -> None:
    """No finished trial is repeated, not even by a second start, which ends as one in one piece does."""
    kept, lab = Kept(), Lab(ROWS, noise=0.05, seed=seed)
    asyncio.run(drive(Search(WRONG, CPU), kept, lab.run, first_s))
    finished = sum(map(len, kept.results.values()))
    asked_before = len(lab.asked)
    found, _ = tuned(lab, kept=kept)
    again = lab.asked[asked_before:]
    assert len({(key_of(args), turn) for args, turn in again}) == len(again)
    assert len(again) + finished == sum(map(len, kept.results.values()))
    whole, _ = tuned(Lab(ROWS, noise=0.05, seed=seed))
    assert (found.args, found.trials) == (whole.args, whole.trials)


@given(
    care=st.sampled_from([0.1, 0.3, 1.0, 2.0, 3.0]),
    running=st.sampled_from([4, 16, 64, 300]),
    pool=st.sampled_from([4_000, 20_000, 100_000]),
    memory=st.sampled_from([0, 50_000, 1_000_000]),
    asked=st.sampled_from([100, 400, 1500]),
)
@settings(max_examples=25)
def test_it_ends_with_the_best_that_it_saw(
    care: float, running: int, pool: int, memory: int, asked: int
) -> None:
    """Without noise no trial of the search was more than a hair faster than the setting that it ends with."""
    lab = Lab(chat_rows(2500, asked=asked), pool_tokens=pool)
    args = {"schedule-conservativeness": care, "max-running-requests": running}
    found, search = tuned(lab, args, machine=replace(CPU, most_pool_tokens=memory), budget_s=5000)
    fastest = max(max(trial["tokens_per_s"]) for trial in found.trials)
    assert search.best.newest.tokens_per_s >= 0.98 * fastest
    assert found.best_tokens_per_s >= found.own_tokens_per_s


def test_a_setting_that_dies_is_unsafe() -> None:
    """A death is a result: the search goes back from it and ends with flags that live."""
    found, search = tuned(Lab(ROWS, deadly=lambda args: args["max-running-requests"] > 100 and "OOM"))
    assert 8 < search.best.args["max-running-requests"] <= 100
    assert "unsafe: OOM" in [trial["verdict"] for trial in found.trials]


def test_the_edge_of_memory() -> None:
    """The pool grows until the engine dies of it, and the last size that lived is taken."""
    args = {"max-running-requests": 512, "schedule-conservativeness": 0.1}
    lab = Lab(ROWS, pool_tokens=5_000, deadly=lambda a: a.get("max-total-tokens", 0) > 20_000 and "OOM")
    found, _ = tuned(lab, args, machine=replace(CPU, most_pool_tokens=10**6))
    assert found.args["max-total-tokens"] == 20_000


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_memory_in_small_steps_to_the_edge(noise: float) -> None:
    """On a GPU it goes to the guides' spare memory at once, then by 0.01 until it dies, and back by one."""
    args = {"max-running-requests": 512, "schedule-conservativeness": 0.1}
    lab = Lab(
        ROWS, card=Card(), noise=noise, deadly=lambda a: a.get("mem-fraction-static", 0) > 0.905 and "OOM"
    )
    found, search = tuned(lab, args, machine=CARD, budget_s=5000)
    tried = [trial["args"] for trial in found.trials if "attention-backend" not in trial["args"]]
    steps = [args.get("mem-fraction-static") for args in tried]
    assert steps == [None, 0.89, 0.9, 0.91]
    assert found.args == {"mem-fraction-static": 0.9}
    assert search.notes["memory"] == "--mem-fraction-static 0.91: unsafe: OOM"


def test_flags_that_die_at_once() -> None:
    """Where not even the job's own flags can be measured the command says what they died of."""
    with pytest.raises(EngineStartError, match="the job's own flags cannot be measured: OOM"):
        tuned(Lab(ROWS, deadly=lambda _: "OOM"))


def test_a_best_whose_repetition_brings_nothing() -> None:
    """Where all rows fail when the best is tried again, what it is raced with takes its place."""
    knob = Knob("x", lambda now: [] if now.args else [Move({"max-running-requests": 9}, "")])
    search = Search({}, CPU, [knob])
    steps = search.steps()
    assert next(steps).args == {}
    assert steps.send(Result("measured", "", 1.0, tokens_per_s=100)).args == {"max-running-requests": 9}
    assert steps.send(Result("measured", "", 1.0, tokens_per_s=103)).args == {}
    with pytest.raises(StopIteration):
        steps.send(Result("measured", "all rows failed", 1.0))
    assert search.best.args == {"max-running-requests": 9}
    assert account(search, "job.yaml", "all rows", 1.0).own_tokens_per_s == 100


def test_hopeless_trials_are_stopped() -> None:
    """A setting that is far behind costs little more than its launch."""
    best = Lab(ROWS).measure(Ask({"max-running-requests": 256}, "", 0))
    slow = Ask({"max-running-requests": 8}, "", 0, Rival(best.curve, 0.15))
    stopped, whole = Lab(ROWS).measure(slow), Lab(ROWS).measure(replace(slow, rival=None))
    assert stopped.ended == "behind"
    assert stopped.cost_s - 25 < 0.6 * (whole.cost_s - 25)


def test_a_wide_batch_is_given_its_time() -> None:
    """A setting that runs more at once ends its first rows later, and is not given up for that."""
    narrow = Lab(ROWS).measure(Ask({"max-running-requests": 8}, "", 0))
    wide = Lab(ROWS).measure(Ask({"max-running-requests": 512}, "", 0, Rival(narrow.curve, 0.1)))
    assert wide.ended == "measured"
    assert wide.tokens_per_s > 2 * narrow.tokens_per_s


def test_a_small_job_is_measured_whole() -> None:
    """Of a job with fewer rows than run at once all of the time counts: there is no steady part."""
    result = Lab(ROWS[:40]).measure(Ask({"max-running-requests": 256}, "", 0))
    assert result.ended == "measured"
    assert result.steady_s == pytest.approx(result.cost_s - 25, abs=0.3)


def test_the_tail_does_not_count() -> None:
    """The last rows, for which nothing waits, do not make a setting look slower than it is."""
    short, long = (Lab(ROWS[:n]).measure(Ask({"max-running-requests": 64}, "", 0)) for n in (400, 4000))
    assert short.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.15)


def test_dead_heats_are_not_won() -> None:
    """Of challengers that are exactly as fast fewer than one in eight is taken for faster, at any noise."""
    luck = random.Random(7)
    for noise in (0.01, 0.05, 0.1):
        wins = 0
        for _ in range(200):
            mine: list[float] = []
            best = [luck.lognormvariate(0, noise)]
            verdict = "again"
            while verdict == "again":
                mine.append(luck.lognormvariate(0, noise))
                while len(best) < len(mine):
                    best.append(luck.lognormvariate(0, noise))
                verdict, _ = compare(mine, best, spread_of([mine, best]))
            wins += verdict == "faster"
        assert wins < 25 + 25 * (noise > 0.05)


@pytest.mark.parametrize("freedom", [*range(4, 15), 20, 40])
def test_the_interval_is_students(freedom: int) -> None:
    """One-sided 95 %, by the density's own integral; from 14 degrees of freedom on a little more."""
    step = quantile(freedom) / 1000
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    density = [(1 + ((at + 0.5) * step) ** 2 / freedom) ** (-(freedom + 1) / 2) for at in range(1000)]
    covered = 0.5 + scale * step * sum(density)
    assert 0.9499 < covered < (0.9501 if freedom < 15 else 0.9575)


def test_more_output_a_pass_settles_a_near_tie() -> None:
    """Where the scheduler's own count says faster, and the times agree, no further trial is spent on it."""
    spread = spread_of([])
    assert compare([103], [100], spread)[0] == "again"
    assert compare([103], [100], spread, more_a_pass=True)[0] == "faster"
    assert compare([80], [100], spread, more_a_pass=True)[0] == "no faster"


BUSY = Signs(running=30, max_running=256, queue=100, empty_share=0, usage=0.5, prefill_limit=2048)
CARD = Machine(Flags(), cpu=False, cards=1, card="NVIDIA H100 80GB HBM3", card_gb=80)
PUT = "schedule-conservativeness"


@pytest.mark.parametrize(
    ("knob", "signs", "expected"),
    [
        (PUT, {}, [{PUT: 0.3}]),
        (PUT, {"usage": 0.95}, "the pool is filled"),
        (PUT, {"empty_share": 0.9}, "nothing waits"),
        (PUT, {"running": 250}, "at max-running-requests 256"),
        (PUT, {"usage": 0.98, "retractions_per_min": 9.0}, [{PUT: 1.3}, {PUT: 1.43}]),
        (PUT, {"usage": 0.98, "retractions_per_min": 0.5}, "the pool is filled"),
        ("memory", {"running": 250}, "at max-running-requests"),
        ("memory", {}, "the log tells neither"),
        (
            "memory",
            {"usage": 0.97, "spare_gb": 13.5, "mem_fraction": 0.83},
            [{"mem-fraction-static": 0.91}, {"mem-fraction-static": 0.84}],
        ),
        ("memory", {"usage": 0.97, "spare_gb": 6.0, "mem_fraction": 0.83}, [{"mem-fraction-static": 0.84}]),
        ("memory", {"usage": 0.97, "spare_gb": 4.6, "mem_fraction": 0.83}, "the edge"),
        ("memory", {"usage": 0.97, "spare_gb": 9.9, "mem_fraction": 0.83}, [{"mem-fraction-static": 0.84}]),
        ("chunked-prefill-size", {"prefill_per_pass": 1900.0}, [{"chunked-prefill-size": 4096}]),
        ("chunked-prefill-size", {"prefill_per_pass": 300.0}, "does not bind"),
        (
            "max-running-requests",
            {"running": 250, "usage": 0.3},
            [{"max-running-requests": 1024}, {"max-running-requests": 512}],
        ),
        ("max-running-requests", {"running": 250, "usage": 0.95}, "the pool holds no more"),
        ("max-running-requests", {}, "stays under 256"),
        (
            "cuda-graph-max-bs",
            {"running": 300, "graph_off_share": 0.6, "mem_fraction": 0.83},
            [
                {"cuda-graph-max-bs-decode": 512},
                {"cuda-graph-max-bs-decode": 512, "mem-fraction-static": 0.81},
            ],
        ),
        ("cuda-graph-max-bs", {"graph_off_share": 0.02}, "2% of the decode passes"),
        ("schedule-policy", {}, "0% of the prompt tokens are shared"),
        ("schedule-policy", {"cached_share": 0.6, "queue": 60}, [{"schedule-policy": "lpm"}]),
        ("schedule-policy", {"cached_share": 0.6, "queue": 300}, "with more than 128 lpm is fcfs"),
        ("schedule-policy", {"cached_share": 0.09, "queue": 60}, "9% of the prompt tokens"),
        ("attention-backend", {"attention_backend": "fa3"}, [{"attention-backend": "flashinfer"}]),
        ("torch-compile", {}, "--allow torch-compile"),
        ("quantization", {}, "--allow quantization"),
        ("parallelism", {}, "one device"),
    ],
)
def test_each_flag_is_tried_when_it_can_matter(
    knob: str, signs: dict[str, Any], expected: list[dict[str, Any]] | str
) -> None:
    """The guides' rules: by the signs of the best trial a flag has values to try, or a reason to be left."""
    (moves_of,) = (k.moves for k in KNOBS if k.name == knob)
    moves = moves_of(Now({}, replace(BUSY, **signs), CARD))
    if isinstance(expected, str):
        assert isinstance(moves, str)
        assert expected in moves
    else:
        assert not isinstance(moves, str), moves
        assert [move.args for move in moves] == expected


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [
        ("NVIDIA B200", "LlamaForCausalLM", ["trtllm_mha", "flashinfer"]),
        ("NVIDIA B200", "DeepseekV3ForCausalLM", ["trtllm_mla", "flashinfer"]),
        ("NVIDIA L4", None, ["flashinfer", "triton"]),
        ("NVIDIA L4", "DeepseekV3ForCausalLM", "SGLang chooses it for DeepseekV3ForCausalLM"),
        ("NVIDIA B200", "GptOssForCausalLM", "SGLang chooses it for GptOssForCausalLM"),
        ("NVIDIA Q1", None, "no choice"),
    ],
)
def test_the_backend_is_that_of_card_and_model(
    card: str, model: str | None, expected: list[str] | str
) -> None:
    """What is tried is what advice would say, and the first general one beside it."""
    (moves_of,) = (k.moves for k in KNOBS if k.name == "attention-backend")
    moves = moves_of(Now({}, replace(BUSY, model=model), replace(CARD, card=card)))
    if isinstance(expected, str):
        assert isinstance(moves, str)
        assert expected in moves
    else:
        assert [move.args["attention-backend"] for move in moves if isinstance(move, Move)] == expected


@pytest.mark.parametrize(("spare_gb", "fraction"), [(2.9, None), (4.5, 0.81), (6.5, 0.9)])
def test_a_small_card_has_smaller_figures(spare_gb: float, fraction: float | None) -> None:
    """Of 24 GB the guides' 5, 6.5 and 10 GB are 3, 3.9 and 6, as they are to advice."""
    (moves_of,) = (k.moves for k in KNOBS if k.name == "memory")
    signs = replace(BUSY, usage=0.97, spare_gb=spare_gb, mem_fraction=0.8)
    moves = moves_of(Now({}, signs, replace(CARD, card="NVIDIA L4", card_gb=24)))
    found = None if isinstance(moves, str) else moves[0].args["mem-fraction-static"]
    assert found == fraction


@pytest.mark.parametrize(
    ("knob", "args", "signs", "machine", "note"),
    [
        (PUT, {PUT: 1.43}, {"usage": 0.98, "retractions_per_min": 9.0}, {}, "1.43 reserves all"),
        ("memory", {}, {"pool_tokens": 20_000}, {"cpu": True}, "is not known"),
        ("memory", {}, {}, {"cpu": True, "most_pool_tokens": 9000}, "is not known"),
        ("memory", {"mem-fraction-static": 0.995}, {"spare_gb": 6.0}, {}, "all of the card"),
        ("max-running-requests", {}, {"running": 250, "empty_share": 0.9}, {}, "nothing waits"),
        ("chunked-prefill-size", {}, {}, {}, "the log tells no prefill passes"),
        ("chunked-prefill-size", {}, {"prefill_limit": 32_768, "prefill_per_pass": 3e4}, {}, "than 16384"),
        ("chunked-prefill-size", {}, {"prefill_limit": -1, "prefill_per_pass": 300.0}, {}, "is off"),
        ("max-running-requests", {}, {"running": 7.0, "max_running": 8, "usage": 0.89}, {}, "holds 8"),
    ],
)
def test_what_is_left_alone_has_its_reason(
    knob: str, args: Args, signs: dict[str, Any], machine: dict[str, Any], note: str
) -> None:
    """Where nothing is left to try, or too little is known, the table has a true word on it."""
    (moves_of,) = (k.moves for k in KNOBS if k.name == knob)
    moves = moves_of(Now(args, replace(BUSY, **signs), replace(CARD, **machine)))
    assert isinstance(moves, str)
    assert note in moves


def test_flags_that_are_null_and_a_server_that_runs_one() -> None:
    """A flag that the job takes back with null is at its default; a mean of no running row is no failure."""
    by_name = {knob.name: knob.moves for knob in KNOBS}
    bolder = by_name[PUT](Now({PUT: None}, BUSY, CARD))
    more = by_name["max-running-requests"](Now({}, replace(BUSY, running=0, max_running=1, usage=0), CARD))
    assert isinstance(bolder, list)
    assert isinstance(more, list)
    assert [move.args for move in bolder] == [{PUT: 0.3}]
    assert [move.args["max-running-requests"] for move in more] == [32, 6]


def test_what_needs_leave_is_tried_with_it() -> None:
    """Quantization and torch.compile are tried when allowed, FP8 only on a card that has it."""
    allowed = replace(CARD, allowed=frozenset({"quantization", "torch-compile"}))
    by_name = {knob.name: knob.moves for knob in KNOBS}
    quantized = by_name["quantization"](Now({}, BUSY, allowed))
    assert [move.args for move in quantized if not isinstance(move, str)] == [
        {"kv-cache-dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
    ]
    assert not isinstance(by_name["torch-compile"](Now({}, BUSY, allowed)), str)
    old = replace(allowed, card="NVIDIA A100-SXM4-80GB")
    assert "no FP8" in by_name["quantization"](Now({}, BUSY, old))


@pytest.mark.parametrize("name", ["tp-size", "tensor-parallel-size", "tp"])
def test_replicas_are_the_gateways(name: str) -> None:
    """On several cards no --dp-size is tried: the table says which gateway to take, by any name of tp."""
    (moves_of,) = (k.moves for k in KNOBS if k.name == "parallelism")
    four = replace(CARD, cards=4)
    assert moves_of(Now({}, BUSY, four)) == (
        "engine: {kind: gateway, tp: 1} has 4 replicas on 4 GPUs, each about as fast"
    )
    assert "{kind: gateway, tp: 2} has 2 replicas on 4 GPUs" in moves_of(Now({name: 2}, BUSY, four))
    assert "with a tp under 4 is faster" in moves_of(Now({name: 4}, BUSY, four))
    assert moves_of(Now({}, BUSY, replace(four, one_of_several=True))) == "one replica"


def test_flags_go_by_the_names_that_are_there() -> None:
    """A flag is set under the name that the job has for it, else under that of the installed version."""
    card = replace(CARD, flags=Flags("0.5.2", frozenset({"cuda-graph-max-bs", "attention-backend"})))
    signs = replace(BUSY, graph_off_share=0.9)
    for own, name in (
        ({}, "cuda-graph-max-bs"),
        ({"cuda-graph-max-bs-decode": 8}, "cuda-graph-max-bs-decode"),
    ):
        (graphs,) = (knob for knob in KNOBS if knob.name == "cuda-graph-max-bs")
        steps = Search(own, card, [graphs]).steps()
        next(steps)
        assert steps.send(Result("measured", "", 1.0, 100.0, signs=signs)).args == {name: 256}


def test_a_flag_that_the_version_lacks_is_not_tried() -> None:
    """The search asks for nothing that the installed version would refuse, and the table says so."""
    lacking = replace(CPU, flags=Flags("0.4.0", frozenset({"max-running-requests"})))
    found, search = tuned(Lab(ROWS), {"max-running-requests": 256}, machine=lacking)
    assert found.args == {}
    assert search.notes[PUT] == "this version has no --schedule-conservativeness 0.3"


def test_the_table_names_each_trial_and_reason() -> None:
    """What is printed has every setting with its verdict, every flag with a reason, and the block to take."""
    found, _ = tuned(Lab(ROWS))
    text = "\n".join(found.lines())
    assert text.count("x the best") >= 3
    assert "engine:\n  args:\n    schedule-conservativeness: 0.1\n    max-running-requests: 256\n" in text
    assert all(f"\n{knob.name}: " in text for knob in KNOBS)
    assert "--apply writes this" in text


def test_a_curve_goes_on_beyond_its_end() -> None:
    """A trial that outlasts the best is compared with how the best would have gone on."""
    curve = ((0.0, 0), (10.0, 0), (20.0, 1000), (30.0, 2000))
    assert tokens_at(curve, 15.0) == 500
    assert tokens_at(curve, 40.0) == pytest.approx(3000)


def test_readings_of_several_schedulers_are_added() -> None:
    """With data parallelism running and queue are those of all ranks, token usage is their mean."""
    watch = TrialWatch()
    watch.row_ended(5)
    for at_s in range(30):
        ranks = [
            SchedulerLoad(f"#dp{rank}", "loads", 10 * rank, 3, 0.2 * rank, max_running=32) for rank in (1, 2)
        ]
        watch.look(float(at_s), ranks)
        for _ in range(10):
            watch.row_ended(5)
    signs = watch.result("measured", "", 30.0, 30.0).signs
    assert (signs.running, signs.queue, signs.max_running) == (30, 6, 64)
    assert signs.usage == pytest.approx(0.3)


def test_passes_are_those_of_the_tokens_counted() -> None:
    """A trial too short for steady time counts from its first row to its last: so does its log."""
    watch = TrialWatch()
    end = Moment(20.0, 80, 16, 2000)
    for at_s, size in ((3.0, 300), (6.0, 600), (7.0, 700)):
        watch.row_ended(5)
        watch.look(at_s, [SchedulerLoad("0", "loads", 1, 3, 0.5)], size)
    assert watch.span(end) == ((0.0, 0, 0, 0), end)
    watch.row_ended(5)
    watch.look(16.0, [SchedulerLoad("0", "loads", 1, 3, 0.5)], 1600)
    assert watch.span(end) == ((3.0, 5, 1, 300), (16.0, 20, 4, 1600))
