"""The table of rules: the guides' signs and advice, each with its source. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.advise.rules import deaths as death_rules
from batchrunner.advise.rules import load as load_rules
from batchrunner.advise.rules import memory as memory_rules
from batchrunner.advise.rules import passes as pass_rules
from batchrunner.advise.rules import setup as setup_rules
from batchrunner.advise.rules.rule import Rule

if TYPE_CHECKING:
    from batchrunner.advise.advice import Advice
    from batchrunner.advise.situation import Situation
    from batchrunner.engines.flags import Flags

OFTEN = "often"
"""In 25% of the samples, and at least 8 of them over 10 s: `frequent`, `samples`, `span_s`."""

RULES: tuple[Rule, ...] = (
    Rule(
        "queue-empty",
        f"`#queue-req` 0 {OFTEN}, the drain at the end left out; of a run: while rows are left",
        "send more at once; of a run, what holds it up: window, connections, rendering, retries, or the "
        "server's front process",
        "G1-G4",
        load_rules.queue_empty,
        "a full batch: a place that falls free is taken at once",
        "a request waits before it is run",
    ),
    Rule(
        "queue-deep",
        f"`#queue-req` > 2000 {OFTEN}",
        "send fewer at once; where it is empty often too, evenly",
        "G1",
        load_rules.queue_deep,
        "less scheduling between two passes",
        certainty="high",
    ),
    Rule(
        "conservative",
        f"token usage < 0.9 and `#queue-req` > 0 {OFTEN}, fewer running than may, the pool full in < 10%",
        "`--schedule-conservativeness 0.3`, or a tighter `max_new_tokens` (of a run, with the "
        "measured share)",
        "G1-G4",
        load_rules.conservative,
        "more requests run at once, with the same answers",
        "if outputs are long after all, requests are retracted: about one a minute is fine",
    ),
    Rule(
        "running-capped",
        f"running ≥ 95% of max_running_requests, `#queue-req` > 0, token usage < 0.9 {OFTEN}, the pool full "
        "in < 10%",
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
        pass_rules.running_low,
        "more prompts a prefill pass, and so a larger batch",
        "decoding pauses longer; memory",
        "low",
    ),
    Rule(
        "retractions",
        "more than 1 retraction a minute (a span under a minute counts as one), and tokens computed again "
        "≥ 25% of those generated, where the log tells; up to that it is said to be fine",
        "`--schedule-conservativeness 1.3`, from there 1.43, where all of `max_new_tokens` is reserved; then "
        "`--max-running-requests` down, or a larger pool. Not mem-fraction-static down, as G1 has it "
        "for frequent retractions: that shrinks the pool which is too small; it helps out-of-memory errors",
        "G1-G4",
        load_rules.retractions,
        "less work is done twice; a smaller --mem-fraction-static would not help, it shrinks the pool "
        "that is full",
        "fewer requests run until it is known how long their outputs are; SGLang corrects itself after each "
        "retraction, so that speed changes by some per cent, up or down",
        "low",
    ),
    Rule(
        "memory-left",
        "`available_gpu_mem` at ready > 10 GB; 5-10 is said to be good (the guides: 5-8); on cards under 40 "
        "GB in proportion, with chunks over 8192 more",
        "`--mem-fraction-static` up to leave 6.5 GB, by the card's memory; `--max-total-tokens` off",
        "G1, G2, G4",
        memory_rules.memory_left,
        "a larger KV pool: more requests at once",
        "nearer to out of memory: go back 0.01 where it happens",
    ),
    Rule(
        "memory-tight",
        "`available_gpu_mem` at ready < 5 GB, on cards under 40 GB in proportion",
        "`--mem-fraction-static` down to leave 6.5 GB, as far as weights and a pool leave room",
        "G1, G2, G4",
        memory_rules.memory_tight,
        "room for activations: no crash in mid-run",
        "a smaller KV pool",
    ),
    Rule(
        "oom-prefill",
        "out of memory in a prefill pass (its line, or the traceback)",
        "`--chunked-prefill-size` 4096, then 2048, then mem-fraction-static down",
        "G1-G4",
        memory_rules.oom_prefill,
        "smaller activations",
        "slower prefill of long prompts",
        "high",
    ),
    Rule(
        "oom-decode",
        "out of memory in decoding, or of request slots",
        "`--max-running-requests` to 3/4 of what ran",
        "G1-G4",
        memory_rules.oom_decode,
        "smaller batches fit",
        "less at once",
        "high",
    ),
    Rule(
        "oom-graph",
        "capturing CUDA graphs failed for want of memory",
        "`--cuda-graph-max-bs(-decode)` halved if those of decoding failed; "
        "mem-fraction-static down; at last no graphs",
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
        "out of memory, not known where",
        "`--mem-fraction-static` 0.8, then 0.7, 0.6",
        "G1-G4",
        memory_rules.oom_general,
        "more room for all but the KV pool",
        "a smaller KV pool: less at once",
    ),
    Rule(
        "killed",
        "exit code -9, `Killed`, or the kernel's own line",
        "on a CPU `--max-total-tokens` halved; else more memory for the host's side of it",
        "SGLang's message",
        death_rules.killed,
        "the server lives",
        "on a CPU a smaller KV pool",
    ),
    Rule(
        "crashed",
        "an exception that ended the scheduler, or a child's death, and memory did not run out",
        "its line, to look for; no flag is known to cure it",
        "SGLang's messages",
        death_rules.crashed,
        "the server lives",
        certainty="low",
    ),
    Rule(
        "cuda-graph",
        f"`cuda graph: False` at ≤ 512 running (768 from tp 4) {OFTEN}",
        "where they were disabled, on again; else `--cuda-graph-max-bs(-decode)` 512 or 768, "
        "mem-fraction-static down",
        "G1, G2, G4",
        pass_rules.cuda_graph,
        "less time between kernels at each decode step",
        "some 2 MB for each request, seconds at the start",
    ),
    Rule(
        "long-prompts",
        "one or two prompts fill ≥ 25% of ≥ 8 prefill passes, ≥ 2048 tokens on average: a prompt's, or of "
        "such passes one after the other",
        "`--chunked-prefill-size` doubled, up to 16384 (mem-fraction-static down with it, as far as weights "
        "and a pool leave room); prefill graphs where they are off",
        "G1",
        pass_rules.long_prompts,
        "fewer, larger passes over the weights",
        "1.5 MB of memory a token of the chunk; decoding pauses longer",
    ),
    Rule(
        "attention-backend",
        "a general backend, and the card is known; not of models for which SGLang chooses one itself "
        "(attention sinks, sliding windows; DeepSeek's attention on Ampere and Ada)",
        "Hopper `fa3`, Blackwell `trtllm_mha` or `trtllm_mla`, Ampere and Ada `flashinfer`",
        "G1",
        setup_rules.attention_backend,
        "faster attention",
        "SGLang chooses by itself: it or somebody may have had a reason",
        "low",
    ),
    Rule(
        "tensor-parallel",
        "tp > 1 and all weights ≤ 60% of one GPU; or idle GPUs beside a run's server",
        "a replica a GPU behind the Model Gateway",
        "G1-G4",
        setup_rules.tensor_parallel,
        "no exchange between GPUs at each layer",
        "each replica has its own, smaller KV pool and prefix cache",
    ),
    Rule(
        "data-parallel",
        "`--dp-size` > 1 without DP attention",
        "servers behind the Model Gateway",
        "G1, G2, G4",
        setup_rules.data_parallel,
        "requests go where there is room, or their prefix",
        "several ports, one more process",
        "low",
        option=True,
    ),
    Rule(
        "shared-prefixes",
        "10-60% of prompt tokens from the cache, of ≥ 50 prompts",
        "the runner's order; `--schedule-policy lpm` (default up to 0.4.3, fcfs since 0.4.4) only for other "
        "clients' servers whose queue stays under 128",
        "G1-G4",
        setup_rules.shared_prefixes,
        "what prompts have in common is computed once",
        "lpm: more scheduling, late requests wait",
        "low",
        option=True,
    ),
    Rule(
        "host-cache",
        f"the same with prompts ≥ 1024 tokens and token usage ≥ 0.9 {OFTEN}",
        "`--enable-hierarchical-cache`",
        "G1",
        setup_rules.host_cache,
        "prefixes that the KV pool drops come back from the host's memory",
        "host memory of twice the pool, and transfers",
        "low",
        option=True,
    ),
    Rule(
        "latency-high",
        f"> 0.2 s between two tokens {OFTEN}, not of a run",
        "`--max-running-requests` to half",
        "G1",
        load_rules.latency_high,
        "each answer comes sooner",
        "fewer tokens a second in all: leave it for a batch",
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
        "experts are used unevenly",
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
        f"weights not quantised, by the log; a card with FP8, token usage ≥ 0.9 and `#queue-req` > 0 {OFTEN}",
        "`--quantization fp8`",
        "G1, G2, G4",
        setup_rules.fp8_weights,
        "half the memory for weights, the rest for KV, and faster products",
        "answers change a little",
        "low",
        option=True,
    ),
    Rule(
        "fp8-cache",
        "the same with a 16-bit KV cache, whatever the weights are",
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
        "metrics or cache report off, in the arguments or at /metrics",
        "`--enable-metrics`, `--enable-cache-report`",
        "G1",
        setup_rules.metrics_off,
        "the next advice has more to go by",
        "next to nothing",
        "high",
        option=True,
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}
_TAKES_MEMORY = ("running-low", "long-prompts", "cuda-graph")
_OF_LOAD = (
    *_TAKES_MEMORY, "conservative", "running-capped", "retractions", "memory-left", "memory-tight",
    "latency-high",
)  # fmt: skip
_OF_CARD = (*_OF_LOAD, "tensor-parallel", "torch-compile")
SILENCES: dict[str, tuple[str, ...]] = {
    "oom-weights": ("oom-graph", "oom-prefill", "oom-decode", "oom-general", *_OF_CARD),
    "oom-graph": ("oom-general", *_OF_CARD),
    "oom-prefill": ("oom-general", *_OF_CARD),
    "oom-decode": ("oom-general", *_OF_CARD),
    "oom-general": _OF_CARD,
    "killed": (*_OF_LOAD, "host-cache"),
    "queue-deep": ("queue-empty",),
    "retractions": (*_TAKES_MEMORY, "running-capped", "latency-high"),
    "running-capped": ("latency-high", "conservative"),
    "memory-tight": _TAKES_MEMORY,
    "cuda-graph": ("long-prompts", "running-low"),
    "long-prompts": ("memory-left",),
    "running-low": ("memory-left",),
    "tensor-parallel": ("expert-parallel", "dp-attention"),
    "dp-attention": ("data-parallel",),
}
"""Which advice takes others away, since they would undo it, or give a flag another value: what ran out of
memory gets less to do and nothing else; what lies idle is taken by what needs it; one change of the same
thing at a time. What comes first counts first: advice that was taken away takes none."""


def apply_all(situation: Situation, flags: Flags) -> list[Advice]:
    """Return what all rules have to say: what to change first, then what is well."""
    said = [advice for rule in RULES if (advice := rule.apply(situation, flags))]
    loud, silent = {advice.rule for advice in said if advice.change}, set[str]()
    for rule, others in SILENCES.items():
        silent |= set(others) if rule in loud - silent else set()
    said = [advice for advice in said if not (advice.change and advice.rule in silent)]
    return sorted(said, key=lambda advice: (not advice.change, BY_NAME[advice.rule].option))


def table() -> list[str]:
    """Return the rules as a table of Markdown, as docs/advice.md has it."""
    rows = [f"| {r.name} | {r.sign} | {r.advice} | {r.source} |" for r in RULES]
    return ["| rule | sign | advice | source |", "| --- | --- | --- | --- |", *rows]
