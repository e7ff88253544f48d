"""Searches and trials in virtual time: the simulated scheduler in the engine's place, and a client."""

import asyncio
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchrunner.engines.simulation.replica import CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest
from batchrunner.runner.tune import TrialHistory, TuningSummary, run_search, summarize
from batchrunner.sglang.flags import CLIP, Flags, StatePool, slots_per_request
from batchrunner.sglang.logs.lines import ServerReady
from batchrunner.sglang.logs.reader import Facts
from batchrunner.sglang.logs.series import Prefills, Series, sample_of_load
from batchrunner.tuning.measurement import TrialResult, TrialWatch
from batchrunner.tuning.search import Search, TrialRequest, key_of
from batchrunner.tuning.situation import ClientActivity, Situation
from batchrunner.tuning.space import Args, Machine

TICK_S = 0.25
TINY_CPU = CostModel(base_s=6e-3, sample_s=2.5e-4, kv_token_s=1e-7, prefill_token_s=5e-5)
"""About what the tiny model takes on two cores."""
FAST_GPU = CostModel(base_s=1e-2, sample_s=5e-5, kv_token_s=2e-8, prefill_token_s=1e-5)
"""A pass that takes little longer with more requests, as on a card."""
CPU = Machine(Flags(), most_pool_tokens=0)


@dataclass(frozen=True)
class Card:
    """A GPU of 80 GB with a model on it."""

    weights_gb: float = 16.0
    other_gb: float = 2.0
    tokens_a_gb: float = 400.0
    """Few, so that a small sample fills it."""

    def pool_tokens(self, fraction: float) -> int:
        return int((80 * fraction - self.weights_gb) * self.tokens_a_gb)

    def spare_gb(self, fraction: float) -> float:
        return 80 * (1 - fraction) - self.other_gb


@dataclass(frozen=True)
class Hybrid:
    """Memory for the two pools of a hybrid model, divided as by SGLang (`_handle_max_mamba_cache`)."""

    pools_gb: float = 5.2
    state_gb: float = 0.05
    """A state in float32."""
    tokens_a_gb: int = 2000

    def states(self, args: Args) -> StatePool:
        state_gb = self.state_gb / (2 if args.get("mamba-ssm-dtype") == "bfloat16" else 1)
        ratio = args.get("mamba-full-memory-ratio", 0.9)
        slots = args.get("max-mamba-cache-size")
        if slots is None and args.get("disable-radix-cache"):
            slots = args.get("max-running-requests")
        if slots is None:
            slots = int((self.pools_gb * ratio / (1 + ratio) - state_gb) // state_gb)
        pool_gb = (slots + 1) * state_gb
        return StatePool(slots, slots_per_request(arguments_of(args)), pool_gb, self.pools_gb - pool_gb)

    def pool_tokens(self, args: Args) -> int:
        kv_gb = self.states(args).kv_gb
        assert kv_gb is not None
        return int(kv_gb * self.tokens_a_gb)


def arguments_of(args: Args) -> dict[str, Any]:
    """Return flags by the names that a server's log has for them."""
    return {name.replace("-", "_"): value for name, value in args.items()}


@dataclass
class Lab:
    """Measures settings as `TrialRunner.run` does, with no engine and no clock."""

    rows: Sequence[tuple[int, int, int]]
    """Prompt, output and asked tokens of the sample's rows."""
    pool_tokens: int = 40_000
    max_running: int = 32
    """Defaults of the server."""
    cost: CostModel = TINY_CPU
    launch_s: float = 25.0
    noise: float = 0.0
    """Standard deviation of a trial's log speed."""
    seed: int = 1
    deadly: Any = lambda args: None
    """Return why a server with these flags dies, or None."""
    chunk: int = 8192
    """Default of the server's `--chunked-prefill-size`."""
    card: Card | None = None
    """A GPU whose `--mem-fraction-static` makes the pool, instead of `pool_tokens`."""
    hybrid: Hybrid | None = None
    """Memory of a hybrid model's pools, instead of `pool_tokens`."""
    waiting: int = 50
    """Requests in flight beyond those that may run."""
    asked: list[tuple[Args, int]] = field(default_factory=list)
    spent_s: float = 0.0

    async def run(self, request: TrialRequest, number: int, within_s: float) -> TrialResult:
        """Stand in for `TrialRunner.run`."""
        self.asked.append((request.args, request.turn))
        result = self.measure(request, within_s)
        self.spent_s += result.cost_s
        return result

    def measure(self, request: TrialRequest, within_s: float = math.inf) -> TrialResult:
        if self.launch_s >= within_s:
            return TrialResult("cut", "no time", within_s)
        if why := self.deadly(request.args):
            return TrialResult("died", why, self.launch_s)
        luck = random.Random(f"{self.seed} {sorted(request.args.items())} {request.turn}")
        slow = math.exp(luck.gauss(0, self.noise))
        config = self.config(request.args)
        replica = Replica(config, self.cost)
        watch, waiting = TrialWatch(request.incumbent), list(reversed(self.rows))
        now = 0.0  # as the replica's clock has it; the trial's is `slow` times as long
        end = None
        while end is None:
            in_flight = replica.scheduler.in_flight
            while waiting and in_flight < config.most_running + self.waiting:
                prompt, output, asked = waiting.pop()
                replica.scheduler.submit(SimulatedRequest(prompt, output, asked))
                in_flight += 1
            now += TICK_S
            for ended in replica.advance(now):
                sample = ended.sample
                watch.row_ended(sample.prompt_tokens, 0, sample.outputs, sample.retractions)
            end = watch.record_load(now * slow, [replica.load])
            if end is None and not replica.busy and not waiting:
                end = ("measured", "all rows")
            if end is None and self.launch_s + now * slow >= within_s:
                end = ("cut", "no time")
        result = watch.result(*end, now * slow, self.launch_s + now * slow)
        scheduler = replica.scheduler
        passes = scheduler.prefill_passes + scheduler.decode_passes
        signs = replace(
            result.signs,
            tokens_per_pass=watch.tokens / passes,
            prefill_per_pass=scheduler.prefilled_tokens / scheduler.prefill_passes,
            decodes_per_prefill=scheduler.decode_passes / scheduler.prefill_passes,
        )
        arguments = arguments_of(request.args)
        spare_gb = None
        if self.card is not None:
            fraction = self._fraction(request.args)
            spare_gb, arguments["mem_fraction_static"] = self.card.spare_gb(fraction), fraction
        chunk = config.chunked_prefill_tokens
        ready = ServerReady(config.max_total_tokens, chunk, config.max_running, gpu_gb=spare_gb)
        states = self.hybrid.states(request.args) if self.hybrid else None
        return replace(result, signs=signs, facts=Facts(arguments=arguments, ready=ready, states=states))

    def _fraction(self, args: Args) -> float:
        fraction: float = args.get("mem-fraction-static", 0.7)
        return fraction

    def config(self, args: Args) -> SchedulerConfig:
        pool_tokens = args.get("max-total-tokens", self.pool_tokens)
        if self.card:
            pool_tokens = self.card.pool_tokens(self._fraction(args))
        if self.hybrid:
            pool_tokens = self.hybrid.pool_tokens(args)
        states = self.hybrid.states(args) if self.hybrid else None
        return SchedulerConfig(
            args.get("max-running-requests", self.max_running),
            pool_tokens,
            radix_cache=not args.get("disable-radix-cache"),
            state_slots=states.slots if states else None,
            slots_per_request=states.per_request if states else 1,
            conservativeness=args.get("schedule-conservativeness", 1.0),
            chunked_prefill_tokens=args.get("chunked-prefill-size", self.chunk),
            clip_tokens=args.get(CLIP, 4096),
            decode_interval=args.get("prefill-decode-interval", 0),
        )


UNSET = dict.fromkeys((
    "mamba_full_memory_ratio", "max_mamba_cache_size", "disable_radix_cache", "mamba_radix_cache_strategy",
    "mamba_ssm_dtype", "max_running_requests",
))  # fmt: skip
"""Arguments that every server of a hybrid model logs."""
WAITING = 450


def live(lab: Lab, args: Args, shared: float = 0.0, seconds: float = 120.0) -> tuple[Situation, float]:
    """Return what a run sees of a hybrid model with `WAITING` requests in its queue, and output tokens/s.

    `shared` is the share of the prompt tokens that the prefix cache serves.
    """
    assert lab.hybrid is not None
    config, rows = lab.config(args), itertools.cycle(lab.rows)
    replica, load = Replica(config, lab.cost), Series()
    now, begins_at, prompt_tokens, tokens = 0.0, seconds / 3, 0, 0
    while now < seconds:
        while replica.scheduler.queue < WAITING:
            replica.scheduler.submit(SimulatedRequest(*next(rows)))
        now += 2 * TICK_S
        for ended in replica.advance(now):
            prompt_tokens += ended.sample.prompt_tokens
            tokens += ended.sample.outputs if now > begins_at else 0
        if now > begins_at:
            load.add("one", sample_of_load(replica.load, at=now, unsent=9999))
    cached = int(shared * prompt_tokens)
    prefills = Prefills(passes=9, prompts=999, new_tokens=prompt_tokens - cached, cached_tokens=cached)
    care = args.get("schedule-conservativeness", 1.0)
    facts = Facts(
        arguments=UNSET | arguments_of(args) | {"schedule_conservativeness": care},
        ready=ServerReady(config.max_total_tokens, 8192, config.most_running, 100_000),
        states=lab.hybrid.states(args),
    )
    situation = Situation(load, Series(load.tracks, prefills), facts, ClientActivity(max_new_tokens=400))
    return situation, tokens / (seconds - begins_at)


def chat_rows(count: int, seed: int = 3, asked: int = 400) -> list[tuple[int, int, int]]:
    """Rows that ask for far more than they put out, as chats do: an engine's care matters."""
    made = random.Random(seed)
    return [
        (made.randint(40, 160), min(asked, max(4, int(made.lognormvariate(3.9, 0.7)))), asked)
        for _ in range(count)
    ]


WRONG = {"schedule-conservativeness": 3, "max-running-requests": 8}
ROWS = chat_rows(4000)


class Kept(TrialHistory):
    """Finished trials in memory, without a file."""

    def __init__(self) -> None:
        self.results: defaultdict[bytes, list[TrialResult]] = defaultdict(list)

    def find(self, args: Args, turn: int) -> TrialResult | None:
        found = self.results[key_of(args)]
        return found[turn] if turn < len(found) else None

    def add(self, args: Args, result: TrialResult) -> None:
        self.results[key_of(args)].append(result)


def tuned(
    lab: Lab,
    args: Args = WRONG,
    *,
    machine: Machine = CPU,
    budget_s: float = 1800,
    kept: Kept | None = None,
) -> tuple[TuningSummary, Search]:
    search = Search(args, machine)
    spent_s = asyncio.run(run_search(search, kept or Kept(), lab.run, budget_s))
    return summarize(search, machine, "job.yaml", "all rows", spent_s), search


CARD = Machine(Flags(), cpu=False, card="NVIDIA H100 80GB HBM3", card_gb=80)
LOG = """
[2025-08-11 17:17:03] server_args=ServerArgs(mem_fraction_static=0.83, attention_backend='fa3', tp_size=1)
[2025-08-11 17:17:03] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.50 GB, \
mem usage=15.00 GB.
[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
[2025-08-11 17:18:03] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 0, token usage: 0.10, \
#running-req: 30, #queue-req: 117
[2025-08-11 17:18:04] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, \
gen throughput (token/s): 4594.01, #queue-req: 317
[2025-08-11 17:18:05] Decode batch, #running-req: 300, #token: 370959, token usage: 0.82, cuda graph: False, \
gen throughput (token/s): 4594.01, #queue-req: 317
"""
"""The log of a trial."""
