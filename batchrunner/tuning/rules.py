"""The table of all rules of advice, with their sources, mostly SGLang's tuning guides.

Rules on deaths come first, then the rules whose advice usually gains most. The module does no I/O.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from batchrunner.sglang.flags import CLIP, Flags, command_line
from batchrunner.sglang.logs.lines import Phase
from batchrunner.tuning import load_rules, memory_rules, setup_rules
from batchrunner.tuning.flags import FLAGS, NGRAM, Move, next_setting
from batchrunner.tuning.recover import FLAGS_AFTER, Kind
from batchrunner.tuning.situation import Certainty, Finding, Situation


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice. An empty `change` means that nothing has to change."""

    rule: str
    """Name of the rule that gives the advice."""
    sign: str
    """What the rule observed, in words: figures, fraction of the load samples, time span."""
    change: str = ""
    """The change in words: a flag as the installed version spells it, or a field of the job."""
    args: dict[str, Any] = field(default_factory=dict)
    """The change as `engine.args`; null removes a flag."""
    effect: str = ""
    """Expected gain of the advice, in words."""
    tradeoff: str = ""
    """The cost of the change."""
    certainty: Certainty = "medium"
    """Certainty that the change helps: `high`, `medium` or `low`."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The figures behind the observation. Their names contain the units."""
    env: dict[str, str] = field(default_factory=dict)
    """The change as `engine.env`, if a variable of the environment is to be changed."""

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
    """One rule of advice, also listed in the docs."""

    name: str
    sign: str
    """The observation that the rule reacts to, with thresholds, in words for the docs."""
    judge: Callable[[Situation, Flags], Finding | None]
    """Returns the finding for a server's load and setup; None if the rule does not apply."""
    effect: str
    """The expected gain of the change in words."""
    flag: str = ""
    """The flag whose next value in `FLAGS` is the advice; empty for other advice."""
    on: str = ""
    """Name of the observation (sign) in `FLAGS` that calls for the flag."""
    other: str = ""
    """Advice other than the flag's next value, for the docs."""
    source: str = ""
    """Source of the rule if it has no `flag`; see `Move.source`."""
    cost: str = ""
    """Cost of the advice if the rule has no `flag`."""
    certainty: Certainty = "medium"
    """Certainty that the change helps, unless the finding has its own."""
    option: bool = False
    """Whether the advice is only an option, because nothing is wrong."""

    @property
    def move(self) -> Move | None:
        """The change of `flag` that the table `FLAGS` lists under the name `on`; None if there is no flag."""
        return FLAGS[self.flag].moves[self.on] if self.flag else None

    @property
    def tradeoff(self) -> str:
        """The cost of the change."""
        return self.move.cost if self.move else self.cost

    def apply(self, situation: Situation, flags: Flags) -> Advice | None:
        """Return the advice of this rule; None if it finds nothing, or its flag does not fit the server."""
        server = situation.server
        if self.flag and not FLAGS[self.flag].fits(self.on, server):
            return None
        finding = self.judge(situation, flags)
        if finding is None:
            return None
        if finding.fine:
            return Advice(self.name, finding.sign, certainty="high", evidence=finding.evidence)
        args = finding.args or {}
        # A finding that names no change itself advises the next value of the rule's flag.
        if self.flag and finding.args is None and not finding.change:
            args = next_setting(self.on, self.flag, server, flags)
        change = finding.change or command_line(args)
        if not change:
            return None
        return Advice(
            rule=self.name,
            sign=finding.sign,
            change=change,
            args=args,
            effect=self.effect,
            tradeoff=self.tradeoff,
            certainty=finding.certainty or self.certainty,
            evidence=finding.evidence,
            env=finding.env,
        )


_TAKES_MEMORY = ("running-low", "long-prompts", "prefill-full", "cuda-graph")
"""Rules whose advice takes GPU memory from the KV pool."""
_LOAD_RULES = (
    *_TAKES_MEMORY,
    "conservative",
    "running-capped",
    "states-full",
    "retractions",
    "memory-left",
    "memory-tight",
    "pool-small",
    "pages-large",
)
"""Rules whose advice is void if memory ran out, because it depends on the load or on the division of memory.
"""
_CARD_RULES = (*_LOAD_RULES, "tensor-parallel", "torch-compile", "answers-repeat")
"""Rules whose advice is void if the memory of a GPU ran out."""
SILENCES: dict[str, tuple[str, ...]] = {
    "oom-weights": ("oom-graph", "oom-prefill", "oom-decode", "oom-general", *_CARD_RULES),
    "oom-graph": ("oom-general", *_CARD_RULES),
    "oom-prefill": ("oom-general", *_CARD_RULES),
    "oom-decode": ("oom-general", *_CARD_RULES),
    "oom-general": _CARD_RULES,
    "killed": (*_LOAD_RULES, "host-cache"),
    "pages-large": ("pool-small", "conservative", "running-low"),
    "pool-small": ("conservative", "running-low", "answers-repeat"),
    "queue-deep": ("queue-empty",),
    "retractions": (*_TAKES_MEMORY, "running-capped", "states-full"),
    "states-full": ("running-capped", "conservative", "running-low", "answers-repeat"),
    "running-capped": ("conservative", "answers-repeat"),
    "conservative": ("answers-repeat",),
    "memory-tight": _TAKES_MEMORY,
    "cuda-graph": ("long-prompts", "running-low", "prefill-full", "memory-left"),
    "long-prompts": ("memory-left", "prefill-full"),
    "running-low": ("memory-left", "prefill-full", "answers-repeat"),
    "prefill-full": ("memory-left", "small-prefills"),
    "memory-left": ("answers-repeat",),
    "cache-off": ("order-of-server", "shared-prefixes", "host-cache"),
    "order-of-server": ("shared-prefixes", "host-cache"),
    "tensor-parallel": ("expert-parallel", "dp-attention"),
    "dp-attention": ("data-parallel",),
}
"""Conflicts between rules: the advice of a rule suppresses that of the rules listed for it. The suppressed
advice would undo the first, or set the same flag to another value. After an out-of-memory error, no advice
may take more memory. Unused memory goes to the advice that needs it most. Only one thing is changed at a
time. Entries apply in order, and a suppressed rule suppresses no other rule."""


OFTEN = "often"
"""Word in the texts of RULES: at least 25% of the load samples show it, with at least 8 samples over at least
10 s (`frequent`, `samples` and `span_s` of `Thresholds`)."""


def _safer_values(kind: Phase | Kind) -> str:
    """Return advice in words to change the flags that recovery changes after a server's death."""
    groups = [" and ".join(f"`--{name}`" for name in names) for names in FLAGS_AFTER[kind]]
    return f"a safer value of {', then of '.join(groups)}"


RULES: tuple[Rule, ...] = (
    Rule(
        name="oom-prefill",
        sign="out of memory in a prefill pass (by SGLang's message, or the traceback)",
        judge=memory_rules.ran_out("prefill", "in prefill"),
        effect="smaller activations",
        other=f"{_safer_values('prefill')}; or FP8 for KV pool or weights (Hopper, Ada, Blackwell), an int8 "
        "or AWQ model (Ampere)",
        source="G1-G4",
        cost="slower prefill of long prompts",
        certainty="high",
    ),
    Rule(
        name="oom-decode",
        sign="out of memory, or of request slots, in decoding",
        judge=memory_rules.ran_out("decode", "in decoding"),
        effect="smaller batches fit",
        other=f"{_safer_values('decode')}; or FP8, int8 or AWQ, as for `oom-prefill`",
        source="G1-G4",
        cost="fewer requests at once",
        certainty="high",
    ),
    Rule(
        name="oom-graph",
        sign="memory ran out while CUDA graphs were captured",
        judge=memory_rules.ran_out("graph", "while CUDA graphs were captured"),
        effect="the graphs fit",
        other=_safer_values("graph"),
        source="G1, SGLang's message",
        cost="larger batches run without CUDA graphs",
        certainty="high",
    ),
    Rule(
        name="oom-weights",
        sign="out of memory while weights load, or no room for a KV pool",
        judge=memory_rules.oom_weights,
        effect="the model starts",
        other="twice the `--tp-size` (on a CPU: more memory), or a quantised model; if only the KV pool has "
        f"no room, {_safer_values('pool')}",
        source="SGLang's message",
        cost="more GPUs, or less memory for activations",
        certainty="high",
    ),
    Rule(
        name="oom-general",
        sign="out of memory in an unknown phase",
        judge=memory_rules.ran_out("general"),
        effect="more memory for everything except the KV pool",
        other=_safer_values("general"),
        source="G1-G4",
        cost="a smaller KV pool: fewer requests at once",
    ),
    Rule(
        name="killed",
        sign="exit code -9, `Killed` in the log, or the kernel's message about a killed process",
        judge=memory_rules.killed,
        effect="the server stays alive",
        other=f"on a CPU {_safer_values('killed')}; on a GPU more host memory",
        source="SGLang's message",
        cost="on a CPU a smaller KV pool",
    ),
    Rule(
        name="crashed",
        sign="an exception that ended the scheduler, or a dead child process, without a lack of memory",
        judge=memory_rules.crashed,
        effect="the server stays alive",
        other="the error message, to search for it; no flag is known to help",
        source="SGLang's messages",
        certainty="low",
    ),
    Rule(
        name="queue-empty",
        sign=f"`#queue-req` is 0 {OFTEN} while rows remain to be sent",
        judge=load_rules.queue_empty,
        effect="a full batch, because a free slot is taken at once",
        other="more requests at once; in a run, a remedy for the cause of the empty queue",
        source="G1-G4",
        cost="requests wait before they run",
    ),
    Rule(
        name="queue-deep",
        sign=f"`#queue-req` > 2000 {OFTEN}",
        judge=load_rules.queue_deep,
        effect="less scheduling work between passes",
        other="fewer requests at once, sent evenly if the queue is also empty often",
        source="G1",
        certainty="high",
    ),
    Rule(
        name="cache-off",
        sign="`--disable-radix-cache`, and ≥ 10% of a run's prompt tokens could come from the cache",
        judge=setup_rules.cache_off,
        effect="common prefixes are computed once",
        flag="disable-radix-cache",
        on="cache-off",
        certainty="high",
    ),
    Rule(
        name="order-of-server",
        sign="a `--schedule-policy` other than fcfs and lpm; ≥ 10% of a run's prompt tokens could have come "
        "from the prefix cache but did not",
        judge=setup_rules.order_of_server,
        effect="rows are taken in the runner's order, which keeps common prefixes together",
        flag="schedule-policy",
        on="reordered",
        certainty="high",
    ),
    Rule(
        name="prefill-full",
        sign="≥ 25% of ≥ 8 prefill passes fill ≥ 90% of a chunk of < 4096 tokens, and requests still wait",
        judge=load_rules.prefill_full,
        effect="fewer, larger passes over the weights",
        flag="chunked-prefill-size",
        on="chunk-full",
    ),
    Rule(
        name="pages-large",
        sign=f"half a page (`--page-size`) is ≥ 15% of a request's pages; requests wait for the KV pool "
        f"{OFTEN}",
        judge=setup_rules.pages_large,
        effect="more requests fit into the KV pool, and shorter prefixes are found in the cache",
        flag="page-size",
        on="large-pages",
    ),
    Rule(
        name="conservative",
        sign=f"token usage < 0.9 and `#queue-req` > 0 {OFTEN}; fewer requests run than allowed; the KV pool "
        "is full in < 10% of the samples",
        judge=load_rules.conservative,
        effect="more requests run at once, with the same answers",
        flag="schedule-conservativeness",
        on="held",
        other=f"or a smaller `max_new_tokens`, or `{CLIP}` (in a run, by the measured output lengths)",
    ),
    Rule(
        name="running-capped",
        sign="≥ 95% of max_running_requests run, or all but one, `#queue-req` > 0 and token usage < 0.9 "
        f"{OFTEN}; the KV pool is full in < 10% of the samples; the log does not say that memory sets the "
        "limit",
        judge=load_rules.running_capped,
        effect="a larger batch",
        flag="max-running-requests",
        on="capped",
        certainty="high",
    ),
    Rule(
        name="states-full",
        sign=f"a hybrid model's state pool is ≥ 90% full, `#queue-req` > 0 and token usage < 0.9 {OFTEN}; "
        "the KV pool is full in < 10% of the samples",
        judge=load_rules.states_full,
        effect="as many requests run as both pools hold",
        other="`--disable-radix-cache` if no prefixes are shared, or `--mamba-radix-cache-strategy "
        "extra_buffer_lazy`, with the `--mamba-full-memory-ratio` or `--max-mamba-cache-size` that fits",
        source="SGLang; computed",
        cost="a smaller KV pool; without the prefix cache, shared prefixes are computed for each request",
    ),
    Rule(
        name="running-low",
        sign=f"< 50% of max_running_requests run, `#queue-req` > 0 and token usage < 0.9 {OFTEN}; the "
        "conservativeness is ≤ 0.3 already; the KV pool is full in < 10% of the samples; ≥ 25% of the "
        "prefill passes are full",
        judge=load_rules.running_low,
        effect="more prompts in a prefill pass, hence a larger batch",
        flag="chunked-prefill-size",
        on="chunk-full",
        certainty="low",
    ),
    Rule(
        name="retractions",
        sign="more than 1 retraction a minute, and ≥ 25% of the tokens are computed again (fewer are fine)",
        judge=load_rules.retractions,
        effect=(
            "less work is done twice (a smaller --mem-fraction-static would not help, because it shrinks the "
            "full pool)"
        ),
        flag="schedule-conservativeness",
        on="retracting",
        other="then a lower `--max-running-requests`, or a larger pool (not the lower mem-fraction-static of "
        "G1, which shrinks the pool)",
        certainty="low",
    ),
    Rule(
        name="memory-left",
        sign="`available_gpu_mem` > 10 GB when the server is ready (5-10 GB are fine; the guides say 5-8); "
        "the limits are lower on GPUs under 40 GB, and higher with chunks over 8192 tokens",
        judge=memory_rules.memory_left,
        effect="a larger KV pool: more requests at once",
        flag="mem-fraction-static",
        on="memory-left",
        other="no `--max-total-tokens`",
    ),
    Rule(
        name="memory-tight",
        sign="`available_gpu_mem` < 5 GB when the server is ready (less on GPUs under 40 GB)",
        judge=memory_rules.memory_tight,
        effect="room for activations: no crash during the run",
        flag="mem-fraction-static",
        on="memory-tight",
    ),
    Rule(
        name="cuda-graph",
        sign=f"`cuda graph: False` {OFTEN}, with ≤ 512 running requests (768 from tp 4 on, 4096 if the "
        "weights take ≤ 2 GB)",
        judge=load_rules.cuda_graph,
        effect="less time between kernels at each decode step",
        flag="cuda-graph-max-bs-decode",
        on="graph-off",
        other="CUDA graphs on, if they are disabled",
    ),
    Rule(
        name="long-prompts",
        sign="≥ 25% of ≥ 8 prefill passes are full with one or two prompts (≥ 2048 tokens on average)",
        judge=load_rules.long_prompts,
        effect="fewer, larger passes over the weights",
        flag="chunked-prefill-size",
        on="chunk-full",
        other="CUDA graphs for prefill, if they are off",
    ),
    Rule(
        name="small-prefills",
        sign="prefill passes of ≤ 25% of a chunk and ≤ 512 tokens, so frequent that an interval between them "
        "saves a fifth of all passes; `#queue-req` is not often 0",
        judge=load_rules.small_prefills,
        effect="decoding is interrupted less often",
        flag="prefill-decode-interval",
        on="small-prefills",
        certainty="low",
    ),
    Rule(
        name="pool-small",
        sign=f"on a CPU: fewer requests run than allowed, `#queue-req` > 0, and token usage ≥ 0.9 or "
        f"`ignore_eos`, {OFTEN}; or retractions",
        judge=memory_rules.pool_small,
        effect="more requests run at once",
        flag="max-total-tokens",
        on="full",
    ),
    Rule(
        name="attention-backend",
        sign="a backend for any GPU, although SGLang has a faster one for this GPU and model",
        judge=setup_rules.attention_backend,
        effect="faster attention",
        flag="attention-backend",
        on="slow-backend",
        certainty="low",
    ),
    Rule(
        name="tensor-parallel",
        sign="tp > 1 although all weights take ≤ 60% of one GPU; or GPUs that the run's server does not use",
        judge=setup_rules.tensor_parallel,
        effect="no communication between GPUs at each layer",
        other="one replica for each GPU",
        source="G1-G4",
        cost="each replica has its own, smaller KV pool and prefix cache",
    ),
    Rule(
        name="data-parallel",
        sign="`--dp-size` > 1 without DP attention",
        judge=setup_rules.data_parallel,
        effect="requests go to a replica that has room, or that has cached their prefix",
        other="several servers, each of which gets rows by its own load",
        source="G1, G2, G4",
        cost="several ports, and one more process",
        certainty="low",
        option=True,
    ),
    Rule(
        name="shared-prefixes",
        sign="10-60% of the prompt tokens come from the prefix cache, over at least 50 prompts",
        judge=setup_rules.shared_prefixes,
        effect="common prefixes are computed once",
        other="the runner's order of rows; `--schedule-policy lpm` for other clients with queues under 128",
        source="G1-G4",
        cost="with lpm, more scheduling work; requests without a cached prefix wait longer",
        certainty="low",
        option=True,
    ),
    Rule(
        name="host-cache",
        sign=f"the sign of rule `shared-prefixes`, prompts of ≥ 1024 tokens, and token usage ≥ 0.9 {OFTEN}",
        judge=setup_rules.host_cache,
        effect="prefixes that the KV pool evicts come back from host memory",
        flag="enable-hierarchical-cache",
        on="evicted",
        certainty="low",
        option=True,
    ),
    Rule(
        name="expert-parallel",
        sign="a mixture of experts, tp > 1, ep 1",
        judge=setup_rules.expert_parallel,
        effect="each GPU computes whole experts",
        flag="ep-size",
        on="split-experts",
        certainty="low",
        option=True,
    ),
    Rule(
        name="dp-attention",
        sign="DeepSeek's attention, tp > 1",
        judge=setup_rules.dp_attention,
        effect="each GPU keeps the KV cache of its own requests only, so more requests fit",
        flag="attn-dp-size",
        on="kv-copies",
        option=True,
    ),
    Rule(
        name="torch-compile",
        sign=f"weights ≤ 10 GB; ≤ 32 running {OFTEN}",
        judge=setup_rules.torch_compile,
        effect="fewer, fused kernels",
        flag="enable-torch-compile",
        on="small-model",
        certainty="low",
        option=True,
    ),
    Rule(
        name="encoder-unused",
        sign="a model that can leave out its part for images, sounds and videos, and a job without them",
        judge=setup_rules.encoder_unused,
        effect="the memory of the unused encoders goes to the KV pool",
        flag="language-model-only",
        on="no-media",
        option=True,
    ),
    Rule(
        name="fixed-guesses",
        sign="speculation by EAGLE or EAGLE3 with one guess at a time, not adaptive",
        judge=setup_rules.fixed_guesses,
        effect="the number of guesses adapts to how many are accepted",
        flag="speculative-adaptive",
        on="speculates",
        certainty="low",
        option=True,
    ),
    Rule(
        name="answers-repeat",
        sign=(
            "≥ 100 answers that repeat text of each other, so that in a replay n-gram speculation yields "
            "≥ 1.3 times the output rate at the present batch size"
        ),
        judge=load_rules.answers_repeat,
        effect="several tokens in a decode step",
        flag=NGRAM,
        on="repeated",
        certainty="low",
        option=True,
    ),
    Rule(
        name="fp8-weights",
        sign=f"16-bit weights, a card with FP8, token usage ≥ 0.9 and `#queue-req` > 0 {OFTEN}",
        judge=setup_rules.pool_full,
        effect="weights take half the memory, so the KV pool is larger; matrix products are faster",
        flag="quantization",
        on="wide-numbers",
        certainty="low",
        option=True,
    ),
    Rule(
        name="fp8-cache",
        sign=f"a 16-bit KV cache, a card with FP8, token usage ≥ 0.9 and `#queue-req` > 0 {OFTEN}",
        judge=setup_rules.pool_full,
        effect="the KV pool holds twice as many tokens",
        flag="kv-cache-dtype",
        on="wide-numbers",
        certainty="low",
        option=True,
    ),
    Rule(
        name="metrics-off",
        sign="`/metrics`, or the count of cached tokens in answers, is off",
        judge=setup_rules.metrics_off,
        effect="the next advice has more data",
        other="`--enable-metrics`, `--enable-cache-report`",
        source="G1",
        cost="almost nothing",
        certainty="high",
        option=True,
    ),
)
"""All rules of advice, in the order in which advice is given."""
BY_NAME = {rule.name: rule for rule in RULES}
"""All rules of advice by their names."""
DEATHS = frozenset(
    {"oom-prefill", "oom-decode", "oom-graph", "oom-weights", "oom-general", "killed", "crashed"}
)
"""Rules on a dead server. They need no load samples, so advice is given even after the shortest run."""


def apply_all(situation: Situation, flags: Flags) -> list[Advice]:
    """Return the advice of all rules: first changes, then optional changes, then what is fine.

    A change is left out if it conflicts with a change that takes precedence; see SILENCES.
    """
    rules = [rule for rule in RULES if situation.is_judged or rule.name in DEATHS]
    all_advice = [advice for rule in rules if (advice := rule.apply(situation, flags))]
    rules_with_change = {advice.rule for advice in all_advice if advice.change}
    silenced = set[str]()
    for rule, silenced_rules in SILENCES.items():
        # A rule silences others only if it is not silenced itself.
        if rule in rules_with_change and rule not in silenced:
            silenced.update(silenced_rules)
    remaining = [advice for advice in all_advice if not (advice.change and advice.rule in silenced)]
    return sorted(remaining, key=lambda advice: (not advice.change, BY_NAME[advice.rule].option))
