"""Rules on queue, token usage, batch size, retractions and forward passes. Each rule is a pure function."""

from dataclasses import replace
from statistics import median
from typing import Any

from batchrunner.core.console import counted
from batchrunner.core.engine_info import QueueBand
from batchrunner.sglang.flags import CLIP, Flags, command_line, variables_in
from batchrunner.tuning.flags import (
    FLAGS,
    LESS_CONSERVATIVE,
    MOST_RUNNING,
    NGRAM,
    STATE_STRATEGY,
    next_setting,
    slots_after,
    state_slots,
    with_beside,
    with_memory,
)
from batchrunner.tuning.signals import (
    ADMITS_TOO_FEW,
    GUIDES,
    SIGNS,
    frequent,
    has_enough,
    is_frequent,
    retractions_cost,
    retracts_often,
    span_in_words,
)
from batchrunner.tuning.situation import Certainty, ClientActivity, Finding, Situation

_OTHER_WAY = {
    False: "`engine.replicas`: servers with a front process each",
    True: "a machine with more cores: the front process shares them with the model",
}
"""Remedy for a slow front process if no flag helps, keyed by whether the model runs on a CPU."""


FRONT_LEVERS = (
    "mm-io-worker-num", "mm-processor-worker-num", "tokenizer-worker-num", "enable-http-worker-reuseport",
    "detokenizer-worker-num",
)  # fmt: skip
"""Flags for a front process that is too slow, in the order in which they are advised."""


def conservativeness(s: Situation) -> float:
    """Return the conservativeness in effect. With DP attention, it differs from the flag's value."""
    value = s.facts.number("schedule_conservativeness")
    return 1.0 if value is None else value


def queue_empty(s: Situation, flags: Flags) -> Finding | None:
    """Find that the queue runs empty, and name the component that fills it too slowly."""
    if not frequent(s.load, "empty"):
        return None
    band = QueueBand(int(GUIDES.queue_low), int(GUIDES.queue_deep)).scaled(s.max_running)
    keep = f"keep {band.low}-{band.high} requests waiting"
    if s.client is None:
        change, why = f"send requests faster, more at once: {keep}", "the client is the bottleneck"
    else:
        change, why = _slow_part(s.client, keep)
    slow = s.client is not None and not change
    settings = (next_setting("starved", name, s.server, flags) for name in FRONT_LEVERS)
    args = next(filter(None, settings), {}) if slow else {}
    while_rows = " while rows were left to send" if s.client else ""
    return Finding(
        f"#queue-req is 0 {s.often('empty')}{while_rows}: {why}",
        args=args,
        change=change or command_line(args) or _OTHER_WAY[s.facts.on_cpu],
        evidence=s.evidence("empty"),
        certainty="high" if s.client else "medium",
    )


def _slow_part(client: ClientActivity, keep: str) -> tuple[str, str]:
    """Return the change to make in the runner, and its reason. The change is empty if the server is slow."""
    if 2 * client.on_way > client.empty:
        remedy = "`tokenize: client`" if client.tokenize == "server" else ""
        why = "requests are on their way to the scheduler (the front process or the network is slow)"
        return remedy, why
    if 2 * client.at_window > client.empty:
        if client.window != "auto":
            return f"`window: auto` instead of {client.window}: {keep}", "the job's window is full"
        if client.connections and client.widest >= 0.9 * client.connections:
            return "raise `ulimit -n`", f"all {client.connections} connections that it allows are in use"
        wider = f"`window: {2 * client.widest}` in the job: twice as many requests as were in flight"
        return wider, "the window is full, and `auto` makes it too narrow"
    if 2 * client.resting > client.empty:
        remedy = "find out why the engine refuses rows (report.json: failures, retries)"
        return remedy, "rows wait for a retry"
    return (
        "give the runner more of the machine: cores for rendering and tokens, input on a faster disk",
        "the window is not full: rows are not read, rendered or tokenized fast enough",
    )


def queue_deep(s: Situation, _: Flags) -> Finding | None:
    """Find that more requests wait than the scheduler should sort through before each pass."""
    if not frequent(s.load, "deep"):
        return None
    if s.client:
        how = "`window: auto` in the job"
    elif frequent(s.load, "empty"):
        how = "send requests evenly, not in bursts"
    else:
        how = "send fewer requests at once"
    return Finding(
        f"#queue-req is above {GUIDES.queue_deep:.0f} {s.often('deep')}",
        change=f"{how}: keep {GUIDES.queue_low:.0f}-{GUIDES.queue_deep:.0f} waiting",
        evidence=s.evidence("deep"),
    )


def conservative(s: Situation, flags: Flags) -> Finding | None:
    """Find that SGLang reserves memory for longer outputs than the rows have."""
    if not s.admits_too_few or s.fills_up:
        return None
    if s.client and s.client.ignore_eos:  # Every output needs all the memory that SGLang reserves for it.
        return None
    share = s.client.output_share if s.client else None
    args = {}
    if conservativeness(s) > LESS_CONSERVATIVE:
        args = next_setting("held", "schedule-conservativeness", s.server, flags)
    elif share is not None and share >= GUIDES.short_output:
        return None
    short = share is not None and share < GUIDES.short_output
    clip = next_setting("held", CLIP, s.server, flags) if short else {}
    cause, tighter, certainty = _cause(share, clip, GUIDES.short_output)
    return Finding(
        f"token usage is below {GUIDES.usage_good:g} (median {s.load.median('usage'):.2f}) with requests "
        f"waiting {s.often('conservative')}: {ADMITS_TOO_FEW}; {cause}",
        args=args,
        change=", or ".join(filter(None, (command_line(args), tighter))),
        evidence={**s.evidence("conservative"), "output_share_of_max_new_tokens": share},
        certainty=certainty,
        env={} if args else variables_in(clip),
    )


def _cause(share: float | None, clip: dict[str, str], short: float) -> tuple[str, str, Certainty]:
    """Return the cause of too few admissions, the change to make in the job, and the certainty."""
    tighter = "a max_new_tokens nearer to real outputs"
    if share is None:
        return "max_new_tokens may be far above real outputs", tighter, "medium"
    cause = f"outputs are {share:.0%} of max_new_tokens on average"
    if share >= short:
        return f"{cause}, which is not the cause", "", "low"
    for name, longest in clip.items():
        tighter += (
            f" (99% of the outputs have at most {longest} tokens), or "
            f"{name}={longest} in the server's environment (engine.env), with which SGLang reserves that "
            "many and cuts no output"
        )
    return cause, tighter, "high"


def running_capped(s: Situation, _: Flags) -> Finding | None:
    """Find that `max_running_requests` is the limit while the KV pool has room."""
    most = s.max_running or 0
    if not frequent(s.load, "capped") or s.fills_up or not 0 < most < MOST_RUNNING:
        return None
    if s.waits_for_states:
        return None
    return Finding(
        f"all {most} allowed requests run, others wait, and token usage is {s.load.median('usage'):.2f} "
        f"{s.often('capped')}: max_running_requests is the limit, not memory",
        evidence={**s.evidence("capped"), "max_running_requests": most},
    )


STATE_LEVERS = ("disable-radix-cache", STATE_STRATEGY, "mamba-full-memory-ratio", "max-mamba-cache-size")
"""Flags against a full state pool. First come the flags that make a request take fewer states."""


def states_full(s: Situation, flags: Flags) -> Finding | None:
    """Find that the state pool of a hybrid model is the limit while the KV pool has room."""
    if not s.waits_for_states or s.fills_up:
        return None
    pool, args = s.facts.states, dict[str, Any]()
    for lever in STATE_LEVERS:
        args = args or with_beside("states", lever, s.server, flags)
    held, ways, would_run = "", [command_line(args)], 0
    if pool and args:
        after = slots_after(args, pool.per_request)
        would_run = state_slots(s.server, after) // after
    if pool is None:
        ways.append("a larger --mamba-full-memory-ratio or --max-mamba-cache-size")
    else:
        held = f" of {pool.slots} states, {pool.per_request} for each request,"
    if FLAGS["mamba-ssm-dtype"].values("states", s.server):
        ways.append("--mamba-ssm-dtype bfloat16, which halves a state and changes answers a little")
    return Finding(
        f"{s.load.median('running'):.0f} requests run, others wait, and token usage is "
        f"{s.load.median('usage'):.2f}: the state pool{held} is the limit, not max_running_requests",
        args,
        ", or ".join(filter(None, ways)),
        {**s.evidence("states"), "state_slots": pool and pool.slots, "would_run": would_run},
    )


def retractions(s: Situation, flags: Flags) -> Finding | None:
    """Find that the KV pool overflows and retracts requests. About one retraction a minute is fine."""
    if not s.retractions:
        return None
    rate = s.retractions_per_min
    reading = f"{counted(s.retractions, 'retraction')}, {rate:.1f} a minute, in {span_in_words(s.load)}"
    evidence = {**s.evidence("full"), "retractions": s.retractions, "retractions_per_min": round(rate, 2)}
    if not retracts_often(rate):
        return Finding(f"{reading}: up to about one a minute is fine", evidence=evidence, fine=True)
    if not has_enough(s.load):  # `AdviceReport.reading` shows the number of retractions.
        return None
    sign = f"{reading}, with token usage at {s.server.usage:.2f}: requests lose their place and their work"
    share, again = s.log.recomputed_share, s.log.prefills.retracted_tokens
    if share is not None:
        cost = f"{again:,} tokens are computed again, {share:.0%} of those generated"
        evidence |= {"tokens_computed_again": again, "recomputed_share": round(share, 4)}
        if not retractions_cost(s.log):
            fine = f"{reading}: {cost}, which costs less than running fewer requests would"
            return Finding(fine, evidence=evidence, fine=True)
        sign += f": {cost}"
    name = "schedule-conservativeness"
    if FLAGS[name].values("retracting", s.server):
        return Finding(sign, evidence=evidence)
    args = next_setting("retracting", "max-running-requests", s.server, flags)
    return Finding(
        f"{sign}, and --{name} {s.server.now(name):g} reserves all of max_new_tokens already",
        args,
        ", or ".join(filter(None, (command_line(args), "more memory for the KV pool"))),
        evidence,
    )


SURELY_LARGE = 4096
"""From this chunk size on, in tokens, the fixed cost of a prefill pass is small on any card."""
LIKE_A_STEP = 512
"""A prefill pass of at most this many tokens takes about as long as a decode step, because both read the
weights once and compute little."""
LEAST_INTERVAL = 2
"""`--prefill-decode-interval` pays only from this number of decode steps on."""
FEWER_PASSES = 1.25
"""`--prefill-decode-interval` pays only if there are at least this many times as many passes without it."""
LARGE_TP = 4
"""Larger CUDA graphs pay from this tensor parallelism on (the guides)."""


def running_low(s: Situation, flags: Flags) -> Finding | None:
    """Find that few requests run, because full prefill passes admit requests only as fast as others end."""
    if not frequent(s.load, "far_below") or s.fills_up or conservativeness(s) > LESS_CONSERVATIVE:
        return None
    prefills = s.log.prefills
    if prefills.passes < GUIDES.samples or not is_frequent(prefills.filled / max(1, prefills.passes)):
        return None
    return Finding(
        f"{s.load.median('running'):.0f} of at most {s.max_running} requests run, others wait and "
        f"memory is left {s.often('far_below')}: they end as fast as full prefill passes admit new ones",
        with_memory("chunk-full", "chunked-prefill-size", s.server, flags),
        evidence=s.evidence("far_below"),
    )


def prefill_full(s: Situation, flags: Flags) -> Finding | None:
    """Find that many prefill passes fill a small chunk, so that their fixed cost is paid too often."""
    prefills = s.log.prefills
    share = prefills.filled_waiting / max(1, prefills.passes)
    if prefills.passes < GUIDES.samples or not is_frequent(share):
        return None
    chunk = int(s.server.now("chunked-prefill-size") or 0)
    if chunk >= SURELY_LARGE:
        return None
    return Finding(
        f"{share:.0%} of {prefills.passes} prefill passes take a whole chunk ({chunk} tokens) and requests "
        "still wait",
        with_memory("chunk-full", "chunked-prefill-size", s.server, flags),
        evidence={"passes": prefills.passes, "full_waiting_share": round(share, 4)},
    )


def small_prefills(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding often stops for prefill passes of few tokens."""
    name = "prefill-decode-interval"
    prefills, chunk = s.log.prefills, s.facts.chunk or 0
    args = next_setting("small-prefills", name, s.server, flags)
    if name not in flags.names or not args or not has_enough(s.log):
        return None
    if s.facts.arguments.get("enable_mixed_chunk"):  # Prefill passes do not stop decoding then.
        return None
    mean_tokens = prefills.new_tokens / max(1, prefills.passes)
    are_small = mean_tokens <= min(GUIDES.small_pass * chunk, LIKE_A_STEP)
    if prefills.passes < GUIDES.samples or not are_small or frequent(s.load, "empty"):
        return None
    steps, interval = s.decode_steps, args[name]
    if interval < LEAST_INTERVAL or not _saves_passes(
        prefills.passes, steps, s.server.output_tokens, interval
    ):
        return None
    steps_per_pass = steps / prefills.passes
    return Finding(
        f"a prefill pass of {mean_tokens:.0f} tokens on average follows every {steps_per_pass:.1f} decode "
        "steps: places are filled one by one, and each pass costs its fixed time",
        args,
        evidence={"passes": prefills.passes},
    )


def _saves_passes(prefills: int, steps: float, output_tokens: float, interval: int) -> bool:
    """Tell whether one prefill pass in `interval` decode steps needs clearly fewer passes than there were.

    An ended request then waits half an interval on average until the next one takes its place, so that a
    smaller share of the places decodes, and more decode steps are needed.
    """
    if prefills * interval <= steps or not output_tokens:
        return False
    decoding_share = 1 - interval / 2 / output_tokens
    if decoding_share <= 0:
        return False
    passes_with_interval = steps / decoding_share * (1 + 1 / interval)
    return prefills + steps >= FEWER_PASSES * passes_with_interval


def long_prompts(s: Situation, flags: Flags) -> Finding | None:
    """Find that one or two prompts fill a prefill pass."""
    prefills = s.log.prefills
    share = prefills.few_long / max(1, prefills.passes)
    if prefills.passes < GUIDES.samples or not is_frequent(share):
        return None
    tokens = prefills.mean_prompt
    if tokens < GUIDES.long_prompt:
        return None
    args = with_memory("chunk-full", "chunked-prefill-size", s.server, flags)
    args |= next_setting("chunk-full", "cuda-graph-backend-prefill", s.server, flags)
    return Finding(
        f"one or two prompts fill the pass in {share:.0%} of {prefills.passes} prefill passes "
        f"({tokens:,.0f} tokens each): long prompts dominate",
        args,
        evidence={"passes": prefills.passes, "few_long_share": round(share, 4)},
    )


def cuda_graph(s: Situation, flags: Flags) -> Finding | None:
    """Find that decoding runs without CUDA graphs, although they matter at its batch sizes."""
    small = 0 < (s.facts.weights_gb or 0) <= GUIDES.launched_gb
    sign = "no_graph_small" if small else "no_graph_tp" if s.facts.tp >= LARGE_TP else "no_graph"
    without = [sample.running for sample in s.log.samples if SIGNS[sign](sample)]
    share = len(without) / max(1, s.log.counted)
    if not has_enough(s.log) or not is_frequent(share):
        return None
    running = median(without)
    if s.facts.graph_disabled:
        older = s.facts.arguments.get("disable_cuda_graph")
        on = next_setting("graph-off", "cuda-graph-backend-decode", s.server, flags)
        args = {"disable-cuda-graph": None} if older else on
        why = "the server's arguments switch them off"
    else:
        args = with_memory("graph-off", "cuda-graph-max-bs-decode", replace(s.server, running=running), flags)
        largest = s.facts.graph_max_bs
        why = f"they are captured up to {largest}" if largest else "they are captured for smaller batches"
    return Finding(
        f"cuda graph: False in {share:.0%} of {span_in_words(s.log)}, at {running:.0f} running: {why}",
        args,
        evidence={**s.evidence(), "no_graph_share": round(share, 4)},
        certainty="high" if s.facts.graph_disabled else None,
    )


FEWEST_ANSWERS = 100
"""Minimum number of answers on which the gain of n-gram speculation is predicted."""


def answers_repeat(s: Situation, flags: Flags) -> Finding | None:
    """Find that answers repeat each other so much that drafts from earlier answers would save time."""
    answers, server = s.client.answers if s.client else 0, s.server
    args = with_beside("repeated", NGRAM, server, flags)
    if answers < FEWEST_ANSWERS or not has_enough(s.load) or not args:
        return None
    figures = {"tokens_a_step": round(server.repeated, 2), "speedup": round(server.ngram_speedup, 2)}
    return Finding(
        f"{answers} answers repeat each other: drafts from earlier answers would yield {server.repeated:.1f} "
        f"tokens a decode step, and at {server.running:.0f} running requests {server.ngram_speedup:.1f} x "
        "the output tokens a second",
        args,
        evidence={**s.evidence(), **figures},
    )
