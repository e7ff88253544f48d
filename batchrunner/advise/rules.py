"""The table of all rules: signs and advice of SGLang's tuning guides, each with its source. Pure.

Advice is given in this order: deaths first, then what usually gains most.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from batchrunner.advise import load_rules, memory_rules, setup_rules
from batchrunner.advise.situation import Certainty, Finding, Situation
from batchrunner.engines.flags import Flags, command_line


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice; without a `change` it says that something is as it should be."""

    rule: str
    """Name of the rule in the table."""
    sign: str
    """The sign that was seen, in one line with figures, share of samples and time span."""
    change: str = ""
    """The change: a flag with its value, as the installed version spells it, or a field of the job."""
    args: dict[str, Any] = field(default_factory=dict)
    """The same for `engine.args`, where the change is server flags; None removes a flag."""
    effect: str = ""
    """The expected gain."""
    tradeoff: str = ""
    """The cost of the change."""
    certainty: Certainty = "medium"
    """How certain the advice is: `high`, `medium` or `low`."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The figures behind the sign, for `--json`; their names have the units."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the server for `engine.env`, where no flag but a variable is the change."""

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as `--json` prints it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        if not self.change:
            return [f"healthy: {self.sign}"]
        notes = [("gain", self.effect), ("cost", self.tradeoff)]
        return [
            f"{self.sign}",
            f"  -> {self.change} ({self.certainty} certainty)",
            *(f"     {name}: {text}" for name, text in notes if text),
        ]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, a row of the table in the docs."""

    name: str
    sign: str
    """The sign with its thresholds, for the table in the docs."""
    advice: str
    """The advice in general, for the table in the docs."""
    source: str
    """The source: SGLang, or a tuning guide: G1 is the newest, G2 SGLang's own of 2025, G3 the oldest, G4 the
    Chinese one."""
    judge: Callable[[Situation, Flags], Finding | None]
    effect: str
    tradeoff: str = ""
    certainty: Certainty = "medium"
    option: bool = False
    """Whether nothing is wrong, and the advice is only an option."""

    def apply(self, situation: Situation, flags: Flags) -> Advice | None:
        """Return this rule's advice; None without a finding, or where this version lacks the flags."""
        found = self.judge(situation, flags)
        if found is None:
            return None
        if found.fine:
            return Advice(self.name, found.sign, certainty="high", evidence=found.evidence)
        change = found.change or command_line(found.args)
        if not change:
            return None
        certainty = found.certainty or self.certainty
        return Advice(
            self.name, found.sign, change, found.args, self.effect, self.tradeoff, certainty, found.evidence,
            found.env,
        )  # fmt: skip


_TAKES_MEMORY = ("running-low", "long-prompts", "prefill-full", "cuda-graph")
_LOAD_RULES = (
    *_TAKES_MEMORY, "conservative", "running-capped", "retractions", "memory-left", "memory-tight",
    "pool-small", "pages-large",
)  # fmt: skip
_CARD_RULES = (*_LOAD_RULES, "tensor-parallel", "torch-compile")
SILENCES: dict[str, tuple[str, ...]] = {
    "oom-weights": ("oom-graph", "oom-prefill", "oom-decode", "oom-general", *_CARD_RULES),
    "oom-graph": ("oom-general", *_CARD_RULES),
    "oom-prefill": ("oom-general", *_CARD_RULES),
    "oom-decode": ("oom-general", *_CARD_RULES),
    "oom-general": _CARD_RULES,
    "killed": (*_LOAD_RULES, "host-cache"),
    "pages-large": ("pool-small", "conservative", "running-low"),
    "pool-small": ("conservative", "running-low"),
    "queue-deep": ("queue-empty",),
    "retractions": (*_TAKES_MEMORY, "running-capped"),
    "running-capped": ("conservative",),
    "memory-tight": _TAKES_MEMORY,
    "cuda-graph": ("long-prompts", "running-low", "prefill-full"),
    "long-prompts": ("memory-left", "prefill-full"),
    "running-low": ("memory-left", "prefill-full"),
    "prefill-full": ("memory-left", "small-prefills"),
    "cache-off": ("order-of-server", "shared-prefixes", "host-cache"),
    "order-of-server": ("shared-prefixes", "host-cache"),
    "tensor-parallel": ("expert-parallel", "dp-attention"),
    "dp-attention": ("data-parallel",),
}
"""Advice that silences other advice, which would undo it or set the same flag differently. After an
out-of-memory error nothing may take more memory; unused memory goes to the advice that needs it; one thing is
changed at a time. Earlier entries count first: advice that is silenced silences none."""


OFTEN = "often"
"""The word for a sign in at least 25% of at least 8 samples over 10 s: `frequent`, `samples`, `span_s`."""

RULES: tuple[Rule, ...] = (
    Rule(
        "oom-prefill",
        "out of memory in a prefill pass (its line, or the traceback)",
        "`--chunked-prefill-size` 4096, then 2048, then a lower mem-fraction-static; or FP8 for KV pool or "
        "weights (Hopper, Ada, Blackwell), an int8 or AWQ model (Ampere)",
        "G1-G4",
        memory_rules.oom_prefill,
        "smaller activations",
        "slower prefill of long prompts",
        "high",
    ),
    Rule(
        "oom-decode",
        "out of memory in decoding, or of request slots",
        "`--max-running-requests` to 3/4 of what ran; or smaller numbers, as after prefill",
        "G1-G4",
        memory_rules.oom_decode,
        "smaller batches fit",
        "fewer requests at once",
        "high",
    ),
    Rule(
        "oom-graph",
        "memory ran out while CUDA graphs were captured",
        "`--cuda-graph-max-bs(-decode)` halved if decode graphs failed; then a lower mem-fraction-static; "
        "at last no graphs",
        "G1, SGLang's message",
        memory_rules.oom_graph,
        "the graphs fit",
        "larger batches run without graphs",
        "high",
    ),
    Rule(
        "oom-weights",
        "out of memory while weights load, or no room for a KV pool",
        "`--tp-size` doubled (on a CPU more memory), or a quantised model; "
        "`--mem-fraction-static` up for the pool",
        "SGLang's message",
        memory_rules.oom_weights,
        "the model starts",
        "more GPUs, or less memory for activations",
        "high",
    ),
    Rule(
        "oom-general",
        "out of memory in an unknown place",
        "`--mem-fraction-static` 0.8, then 0.7, 0.6; then a limit on the running requests; then "
        "smaller chunks and graphs at once",
        "G1-G4",
        memory_rules.oom_general,
        "more memory for all but the KV pool",
        "a smaller KV pool: fewer requests at once",
    ),
    Rule(
        "killed",
        "exit code -9, `Killed`, or the kernel's own line",
        "on a CPU `--max-total-tokens` halved; else more host memory",
        "SGLang's message",
        memory_rules.killed,
        "the server lives",
        "on a CPU a smaller KV pool",
    ),
    Rule(
        "crashed",
        "an exception that ended the scheduler, or the death of a child process, without a lack of memory",
        "the line to search for; no flag is known to cure it",
        "SGLang's messages",
        memory_rules.crashed,
        "the server lives",
        certainty="low",
    ),
    Rule(
        "queue-empty",
        f"`#queue-req` 0 {OFTEN}, except in the drain at the end; in a run: while rows are left",
        "send more at once; in a run, the cause: window, connections, rendering, retries, or the server's "
        "front process",
        "G1-G4",
        load_rules.queue_empty,
        "a full batch: a free slot is taken at once",
        "requests wait before they run",
    ),
    Rule(
        "queue-deep",
        f"`#queue-req` > 2000 {OFTEN}",
        "send fewer at once; send evenly where the queue is often empty too",
        "G1",
        load_rules.queue_deep,
        "less scheduling work between passes",
        certainty="high",
    ),
    Rule(
        "cache-off",
        "`--disable-radix-cache`, and ≥ 10% of the prompt tokens of a run could come from the cache",
        "without it",
        "measured on the real engine",
        setup_rules.cache_off,
        "common prefixes are computed once",
        certainty="high",
    ),
    Rule(
        "order-of-server",
        "a `--schedule-policy` that is neither fcfs nor lpm; in a run, ≥ 10% of the prompt tokens were "
        "computed that could come from the cache",
        "`--schedule-policy fcfs`",
        "SGLang's scheduler; its gain is not measured yet",
        setup_rules.order_of_server,
        "rows are taken in the runner's order, which keeps common prefixes together",
        certainty="high",
    ),
    Rule(
        "prefill-full",
        "≥ 25% of ≥ 8 prefill passes take ≥ 90% of a chunk < 4096, and requests wait after them",
        "`--chunked-prefill-size` doubled (with a lower mem-fraction-static)",
        "measured on the real engine",
        load_rules.prefill_full,
        "fewer, larger passes over the weights",
        "1.5 MB of memory a token of the chunk; longer pauses in decoding",
    ),
    Rule(
        "pages-large",
        f"`--page-size` > 1, of which half is ≥ 15% of a request's place; requests wait for the KV pool "
        f"{OFTEN}; not for backends that need pages",
        "`--page-size 1`",
        "measured on the real engine",
        setup_rules.pages_large,
        "more requests in the same KV pool, and shorter prefixes are found",
        "some attention kernels are faster with pages",
    ),
    Rule(
        "conservative",
        f"token usage < 0.9 and `#queue-req` > 0 {OFTEN}, running below the limit, the pool full in < 10%",
        "`--schedule-conservativeness 0.3`, or a smaller `max_new_tokens` (in a run, with the "
        "measured share)",
        "G1-G4",
        load_rules.conservative,
        "more requests run at once, with the same answers",
        "where outputs turn out long, requests are retracted; about one a minute is fine",
    ),
    Rule(
        "running-capped",
        f"running ≥ 95% of max_running_requests, or one less; `#queue-req` > 0, token usage < 0.9 "
        f"{OFTEN}, the pool full in < 10%",
        "`--max-running-requests` up to what the pool holds",
        "G1 (running close to its maximum)",
        load_rules.running_capped,
        "a larger batch",
        "each request decodes more slowly",
        "high",
    ),
    Rule(
        "running-low",
        f"running < 50% of max_running_requests, `#queue-req` > 0, token usage < 0.9 {OFTEN}, "
        "conservativeness ≤ 0.3 already, the pool full in < 10%, and ≥ 25% of the prefill passes full",
        "`--chunked-prefill-size` doubled, up to 16384",
        "G1",
        load_rules.running_low,
        "more prompts in a prefill pass, hence a larger batch",
        "longer pauses in decoding; more memory",
        "low",
    ),
    Rule(
        "retractions",
        "more than 1 retraction a minute (a shorter span counts as a minute), and tokens computed again "
        "≥ 25% of those generated, where the log has them; below that it is reported as fine",
        "`--schedule-conservativeness 1.3`, then 1.43, which reserves all of `max_new_tokens`; then a lower "
        "`--max-running-requests`, or a larger pool. Not a lower mem-fraction-static, as G1 advises: that "
        "shrinks the pool, which is too small; it helps against out-of-memory errors",
        "G1-G4",
        load_rules.retractions,
        "less work is done twice; a smaller --mem-fraction-static would not help, it shrinks the full pool",
        "fewer requests run until their output lengths are known; SGLang adapts after each retraction, so "
        "speed changes by a few per cent, up or down",
        "low",
    ),
    Rule(
        "memory-left",
        "`available_gpu_mem` when ready > 10 GB; 5-10 is reported as good (the guides: 5-8); less on cards "
        "under 40 GB, in proportion, and more with chunks over 8192",
        "a higher `--mem-fraction-static` that leaves 6.5 GB; no `--max-total-tokens`",
        "G1, G2, G4",
        memory_rules.memory_left,
        "a larger KV pool: more requests at once",
        "nearer to running out of memory: lower it by 0.01 where that happens",
    ),
    Rule(
        "memory-tight",
        "`available_gpu_mem` when ready < 5 GB; less on cards under 40 GB, in proportion",
        "a lower `--mem-fraction-static` that leaves 6.5 GB, as far as weights and a pool allow",
        "G1, G2, G4",
        memory_rules.memory_tight,
        "room for activations: no crash during the run",
        "a smaller KV pool",
    ),
    Rule(
        "cuda-graph",
        f"`cuda graph: False` at ≤ 512 running (768 from tp 4) {OFTEN}",
        "enable them where they are disabled; else `--cuda-graph-max-bs(-decode)` 512 or 768, with a lower "
        "mem-fraction-static",
        "G1, G2, G4",
        load_rules.cuda_graph,
        "less time between kernels at each decode step",
        "about 2 MB for each request, seconds at the start",
    ),
    Rule(
        "long-prompts",
        "one or two prompts fill ≥ 25% of ≥ 8 prefill passes, with ≥ 2048 tokens on average, in one pass or "
        "in several in a row",
        "`--chunked-prefill-size` doubled, up to 16384 (with a lower mem-fraction-static, as far as weights "
        "and a pool allow); prefill graphs where they are off",
        "G1",
        load_rules.long_prompts,
        "fewer, larger passes over the weights",
        "1.5 MB of memory a token of the chunk; longer pauses in decoding",
    ),
    Rule(
        "small-prefills",
        "prefill passes of ≤ 25% of a chunk and ≤ 512 tokens on average, so many that with fewer of them all "
        "passes would be 1.25 times fewer; `#queue-req` not often 0",
        "`--prefill-decode-interval` √(2 · output tokens)",
        "SGLang's pull request 23189",
        load_rules.small_prefills,
        "decoding is interrupted less often",
        "a request that ended leaves its place empty for some steps; not tried on a GPU here",
        "low",
    ),
    Rule(
        "pool-small",
        f"a CPU whose `--max-total-tokens` is the limit: token usage ≥ 0.9, or outputs that are reserved in "
        f"full (`ignore_eos`), with `#queue-req` > 0 and running below the limit {OFTEN}; or retractions",
        "`--max-total-tokens` for all places, up to 8 times as large, by a quarter of the free memory",
        "measured on the real engine",
        memory_rules.pool_small,
        "more requests run at once",
        "memory of the machine",
    ),
    Rule(
        "attention-backend",
        "a general backend on a known card; not for models for which SGLang chooses the backend itself "
        "(attention sinks, sliding windows; DeepSeek's attention on Ampere and Ada)",
        "Hopper `fa3`, Blackwell `trtllm_mha` or `trtllm_mla`, Ampere and Ada `flashinfer`",
        "G1",
        setup_rules.attention_backend,
        "faster attention",
        "SGLang, or a person, may have chosen it for a reason",
        "low",
    ),
    Rule(
        "tensor-parallel",
        "tp > 1 and all weights ≤ 60% of one GPU; or idle GPUs beside the server of a run",
        "one replica for each GPU behind the Model Gateway",
        "G1-G4",
        setup_rules.tensor_parallel,
        "no communication between GPUs at each layer",
        "each replica has its own, smaller KV pool and prefix cache",
    ),
    Rule(
        "data-parallel",
        "`--dp-size` > 1 without DP attention",
        "servers behind the Model Gateway",
        "G1, G2, G4",
        setup_rules.data_parallel,
        "requests go to the replica that has room, or their prefix",
        "several ports, and one more process",
        "low",
        option=True,
    ),
    Rule(
        "shared-prefixes",
        "10-60% of prompt tokens from the cache, of ≥ 50 prompts",
        "the runner's order of rows; `--schedule-policy lpm` only for "
        "servers of other clients whose queue stays under 128",
        "G1-G4",
        setup_rules.shared_prefixes,
        "common prefixes are computed once",
        "lpm: more scheduling work, and late requests wait",
        "low",
        option=True,
    ),
    Rule(
        "host-cache",
        f"the same with prompts ≥ 1024 tokens and token usage ≥ 0.9 {OFTEN}",
        "`--enable-hierarchical-cache`",
        "G1",
        setup_rules.host_cache,
        "prefixes that the KV pool evicts come back from host memory",
        "host memory of twice the pool's size, and transfers",
        "low",
        option=True,
    ),
    Rule(
        "expert-parallel",
        "a mixture of experts, tp > 1, ep 1",
        "`--ep-size` = tp",
        "G1, G2, G4",
        setup_rules.expert_parallel,
        "each GPU computes whole experts",
        "the load of experts is uneven",
        "low",
        option=True,
    ),
    Rule(
        "dp-attention",
        "DeepSeek's attention, tp > 1",
        "`--attn-dp-size` (`--enable-dp-attention`)",
        "G1, G2, G4",
        setup_rules.dp_attention,
        "each GPU keeps the KV cache of its own requests: a pool many times as large",
        "single answers are slower",
        option=True,
    ),
    Rule(
        "torch-compile",
        f"weights ≤ 10 GB; ≤ 32 running {OFTEN}",
        "`--enable-torch-compile`",
        "G1, G2, G4",
        setup_rules.torch_compile,
        "fewer, fused kernels",
        "minutes at the start",
        "low",
        option=True,
    ),
    Rule(
        "fp8-weights",
        f"weights not quantised, by the log; a card with FP8; token usage ≥ 0.9 and `#queue-req` > 0 {OFTEN}",
        "`--quantization fp8`",
        "G1, G2, G4",
        setup_rules.fp8_weights,
        "half the memory for weights, the rest for the KV pool, and faster matrix products",
        "answers change a little",
        "low",
        option=True,
    ),
    Rule(
        "fp8-cache",
        "the same with a 16-bit KV cache and any weights",
        "`--kv-cache-dtype fp8_e4m3`",
        "G1",
        setup_rules.fp8_cache,
        "twice as many tokens in the pool",
        "answers change a little",
        "low",
        option=True,
    ),
    Rule(
        "metrics-off",
        "metrics or the cache report are off, by the arguments or by /metrics",
        "`--enable-metrics`, `--enable-cache-report`",
        "G1",
        setup_rules.metrics_off,
        "the next advice has more data",
        "almost nothing",
        "high",
        option=True,
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}
DEATHS = frozenset(
    {"oom-prefill", "oom-decode", "oom-graph", "oom-weights", "oom-general", "killed", "crashed"}
)
"""Rules that need no load: a server that died is advised on after however short a run."""
ON_GPU = frozenset({
    "memory-left", "memory-tight", "cuda-graph", "attention-backend", "tensor-parallel", "host-cache",
    "expert-parallel", "dp-attention", "torch-compile", "fp8-weights", "fp8-cache",
})  # fmt: skip
"""Rules on what a server has on a GPU only."""
OF_DECODING = frozenset({
    "conservative", "running-capped", "running-low", "retractions", "cuda-graph", "small-prefills",
    "pool-small", "pages-large", "memory-left", "host-cache", "torch-compile", "fp8-weights", "fp8-cache",
})  # fmt: skip
"""Rules on the requests that decode, and on the KV pool that these fill."""


def apply_all(situation: Situation, flags: Flags) -> list[Advice]:
    """Return the advice of all rules in their order: what to change, then options, then what is well."""
    names = set(BY_NAME) if situation.is_judged else DEATHS
    names -= ON_GPU if situation.facts.on_cpu else frozenset()
    names -= OF_DECODING if not situation.decodes else frozenset()
    rules = [rule for rule in RULES if rule.name in names]
    found = [advice for rule in rules if (advice := rule.apply(situation, flags))]
    loud, silent = {advice.rule for advice in found if advice.change}, set[str]()
    for rule, others in SILENCES.items():
        silent |= set(others) if rule in loud - silent else set()
    kept = [advice for advice in found if not (advice.change and advice.rule in silent)]
    return sorted(kept, key=lambda advice: (not advice.change, BY_NAME[advice.rule].option))
