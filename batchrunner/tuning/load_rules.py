"""Rules of advice on queue, token usage, batch size, retractions and passes. Each is a pure function."""

from dataclasses import replace
from statistics import median
from typing import Any

from batchrunner.core.console import counted
from batchrunner.core.engine_info import QueueBand
from batchrunner.sglang.flags import CLIP, Flags, command_line, variables_in
from batchrunner.tuning.flags import (
    FLAGS,
    LARGER_POOL,
    LESS_CONSERVATIVE,
    MOST_RUNNING,
    NGRAM,
    STATE_STRATEGY,
    next_setting,
    slots_after,
    state_slots,
    with_companions,
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

_MORE_SERVERS = "`engine.replicas`: several servers, each with its own front process"
"""Remedy for a slow front process of a server on GPUs, if no flag helps."""
_MORE_CORES = "a machine with more cores, because the front process shares the cores with the model"
"""Remedy for a slow front process of a server on a CPU, if no flag helps."""
NEARLY_ALL = 0.9
"""All connections count as in use if at least this fraction of them was in use at once."""
FRONT_FLAGS = (
    "mm-io-worker-num", "mm-processor-worker-num", "tokenizer-worker-num", "enable-http-worker-reuseport",
    "detokenizer-worker-num",
)  # fmt: skip
"""Flags against a slow front process (HTTP server, tokenizer, detokenizer), in the order of advice."""


def conservativeness(situation: Situation) -> float:
    """Return the `--schedule-conservativeness` of each scheduler, which SGLang lowers with DP attention."""
    value = situation.facts.number("schedule_conservativeness")
    return 1.0 if value is None else value


def queue_empty(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that the queue runs empty, and name the component that fills it too slowly."""
    if not frequent(situation.load, "empty"):
        return None
    band = QueueBand(int(GUIDES.queue_low), int(GUIDES.queue_deep)).scaled(situation.max_running)
    target = f"keep {band.low}-{band.high} requests waiting"
    observation = f"#queue-req is 0 {situation.often('empty')}"
    evidence = situation.evidence("empty")
    if situation.client is None:
        return Finding(
            f"{observation}: the client is the bottleneck",
            args={},
            change=f"send requests faster, and more at once: {target}",
            evidence=evidence,
            certainty="medium",
        )
    change, cause = _slow_component(situation.client, target)
    args: dict[str, Any] = {}
    if not change:
        # The runner cannot help, so advise a flag against a slow front process.
        settings = (next_setting("starved", name, situation.server, flags) for name in FRONT_FLAGS)
        args = next(filter(None, settings), {})
        without_flag = _MORE_CORES if situation.facts.on_cpu else _MORE_SERVERS
        change = command_line(args) or without_flag
    return Finding(
        f"{observation} while rows were left to send: {cause}",
        args=args,
        change=change,
        evidence=evidence,
        certainty="high",
    )


def _slow_component(client: ClientActivity, target: str) -> tuple[str, str]:
    """Return a remedy on the runner's side, and the main cause of an empty engine queue.

    The remedy is empty if the cause is the server's front process or the network. `target` is the advised
    queue length.
    """
    # A cause counts if it holds in more than half of the load samples with an empty queue.
    half = client.empty / 2
    if client.on_way > half:
        change = "`tokenize: client`" if client.tokenize == "server" else ""
        return change, "requests are on their way to the scheduler (the front process or the network is slow)"
    if client.at_window > half:
        if client.window != "auto":
            return f"`window: auto` instead of {client.window}: {target}", "the job's window is full"
        if client.connections and client.widest >= NEARLY_ALL * client.connections:
            cause = f"all {client.connections} connections that the limit of open files allows are in use"
            return "raise `ulimit -n`", cause
        change = f"`window: {2 * client.widest}` in the job: twice as many requests as were in flight"
        return change, "the job's window is full, because `auto` keeps it too narrow"
    if client.resting > half:
        change = "find out why the engine refuses rows (report.json: failures, retries)"
        return change, "rows wait for a retry"
    return (
        "give the runner more cores for rendering and tokenizing, or read the input from a faster disk",
        "the job's window is not full, because rows are not read, rendered or tokenized fast enough",
    )


def queue_deep(situation: Situation, _: Flags) -> Finding | None:
    """Detect that so many requests wait that sorting them slows the scheduler down."""
    if not frequent(situation.load, "deep"):
        return None
    if situation.client:
        how = "`window: auto` in the job"
    elif frequent(situation.load, "empty"):
        how = "send requests evenly, not in bursts"
    else:
        how = "send fewer requests at once"
    return Finding(
        f"#queue-req is above {GUIDES.queue_deep:.0f} {situation.often('deep')}",
        change=f"{how}: keep {GUIDES.queue_low:.0f}-{GUIDES.queue_deep:.0f} requests waiting",
        evidence=situation.evidence("deep"),
    )


def conservative(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that SGLang reserves memory for longer outputs than the rows have."""
    if not situation.admits_too_few or situation.fills_up:
        return None
    # With `ignore_eos`, every output needs all the memory that SGLang reserves for it.
    if situation.client and situation.client.ignore_eos:
        return None
    output_share = situation.client.output_share if situation.client else None
    is_short = output_share is not None and output_share < GUIDES.short_output
    args: dict[str, Any] = {}
    if conservativeness(situation) > LESS_CONSERVATIVE:
        args = next_setting("held", "schedule-conservativeness", situation.server, flags)
    elif output_share is not None and not is_short:
        # The flag is already low, and `max_new_tokens` is not too high.
        return None
    # If outputs are short, the variable CLIP makes SGLang reserve fewer tokens for each.
    variable = next_setting("held", CLIP, situation.server, flags) if is_short else {}
    cause, job_change, certainty = _cause_of_reserve(
        output_share, is_short=is_short, clip_tokens=variable.get(CLIP)
    )
    return Finding(
        f"token usage is below {GUIDES.usage_good:g} (median {situation.load.median('usage'):.2f}) with "
        f"requests waiting {situation.often('conservative')}: {ADMITS_TOO_FEW}; {cause}",
        args=args,
        change=", or ".join(filter(None, (command_line(args), job_change))),
        evidence={**situation.evidence("conservative"), "output_share_of_max_new_tokens": output_share},
        certainty=certainty,
        # Advise the variable only if no flag is advised: one setting is changed at a time.
        env={} if args else variables_in(variable),
    )


def _cause_of_reserve(
    output_share: float | None, *, is_short: bool, clip_tokens: int | None
) -> tuple[str, str, Certainty]:
    """Return why SGLang reserves too much memory for outputs, the change in the job, and the certainty.

    `output_share` is the mean output length as a fraction of `max_new_tokens`, and `is_short` says that it is
    small. `clip_tokens` is the new limit (CLIP) of the output tokens that SGLang reserves per request; None
    if the limit cannot be lowered.
    """
    job_change = "a max_new_tokens closer to real output lengths"
    if output_share is None:
        return "max_new_tokens may be far above real output lengths", job_change, "medium"
    cause = f"outputs are {output_share:.0%} of max_new_tokens on average"
    if not is_short:
        return f"max_new_tokens is not the cause, because {cause}", "", "low"
    if clip_tokens is not None:
        job_change += (
            f" (99% of the outputs have at most {clip_tokens} tokens), or {CLIP}={clip_tokens} in the "
            "server's environment (engine.env), with which SGLang reserves that many tokens and truncates no "
            "output"
        )
    return cause, job_change, "high"


def running_capped(situation: Situation, _: Flags) -> Finding | None:
    """Detect that `max_running_requests` is the limit while the KV pool has room."""
    most = situation.max_running or 0
    # SGLang's own defaults never exceed MOST_RUNNING, so no higher limit is advised.
    if not frequent(situation.load, "capped") or situation.fills_up or not 0 < most < MOST_RUNNING:
        return None
    # If the state pool is the limit, a higher `max_running_requests` does not help.
    if situation.waits_for_states:
        return None
    return Finding(
        f"all {most} allowed requests run, others wait, and token usage is "
        f"{situation.load.median('usage'):.2f} {situation.often('capped')}: max_running_requests is the "
        "limit, not memory",
        evidence={**situation.evidence("capped"), "max_running_requests": most},
    )


STATE_FLAGS = ("disable-radix-cache", STATE_STRATEGY, "mamba-full-memory-ratio", "max-mamba-cache-size")
"""Flags against a full state pool of a hybrid model. Flags that reduce the states per request come first."""


def states_full(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that the state pool of a hybrid model is the limit while the KV pool has room."""
    if not situation.waits_for_states or situation.fills_up:
        return None
    settings = (with_companions("states", flag, situation.server, flags) for flag in STATE_FLAGS)
    args = next(filter(None, settings), {})
    pool = situation.facts.states
    pool_size = ""
    # Number of requests that would run after the change, from which flag tuning predicts the gain. It is 0 if
    # too little is known.
    would_run = 0
    if pool is not None:
        pool_size = f" of {pool.slots} states, {pool.per_request} for each request,"
        slots_per_request = slots_after(args, pool.per_request)
        would_run = state_slots(situation.server, slots_per_request) // slots_per_request
        if 0 < would_run < LARGER_POOL * pool.most_running:
            # The gain would be too small for a restart.
            args = {}
    remedies = [command_line(args)]
    if pool is None:
        remedies.append("a larger --mamba-full-memory-ratio or --max-mamba-cache-size")
    elif not args and situation.facts.states_follow_running:
        remedies.append("a larger --max-running-requests, which also sets the number of states")
    # If an argument sets the number of slots, the pool holds no more requests with smaller states.
    has_wide_states = bool(FLAGS["mamba-ssm-dtype"].values("states", situation.server))
    if has_wide_states and not situation.facts.sizes_states:
        remedies.append("--mamba-ssm-dtype bfloat16, which halves a state and changes answers a little")
    return Finding(
        f"{situation.load.median('running'):.0f} requests run, others wait, and token usage is "
        f"{situation.load.median('usage'):.2f}: the state pool{pool_size} is the limit, not "
        "max_running_requests",
        args=args,
        change=", or ".join(filter(None, remedies)),
        evidence={**situation.evidence("states"), "state_slots": pool and pool.slots, "would_run": would_run},
    )


def retractions(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that the KV pool overflows and retracts requests. About one retraction a minute is fine."""
    if not situation.retractions:
        return None
    rate = situation.retractions_per_min
    span = span_in_words(situation.load)
    reading = f"{counted(situation.retractions, 'retraction')}, {rate:.1f} a minute, in {span}"
    evidence = {
        **situation.evidence("full"),
        "retractions": situation.retractions,
        "retractions_per_min": round(rate, 2),
    }
    if not retracts_often(rate):
        return Finding(f"{reading}: up to about one a minute is fine", evidence=evidence, fine=True)
    # With too few load samples, only the number of retractions is reported.
    if not has_enough(situation.load):
        return None
    observation = (
        f"{reading}, with token usage at {situation.server.usage:.2f}: retracted requests lose their work"
    )
    recomputed_share = situation.log.recomputed_share
    if recomputed_share is not None:
        recomputed_tokens = situation.log.prefills.retracted_tokens
        cost = f"{recomputed_tokens:,} tokens are computed again, {recomputed_share:.0%} of those generated"
        evidence |= {
            "tokens_computed_again": recomputed_tokens,
            "recomputed_share": round(recomputed_share, 4),
        }
        if not retractions_cost(situation.log):
            comparison = f"{reading}: {cost}, which costs less than running fewer requests would"
            return Finding(comparison, evidence=evidence, fine=True)
        observation += f": {cost}"
    rule_flag = "schedule-conservativeness"
    if FLAGS[rule_flag].values("retracting", situation.server):
        # A finding without `args` advises the next value of the rule's flag.
        return Finding(observation, evidence=evidence)
    present = situation.server.value_of(rule_flag)
    args = next_setting("retracting", "max-running-requests", situation.server, flags)
    return Finding(
        f"{observation}, and --{rule_flag} {present:g} reserves all of max_new_tokens already",
        args=args,
        change=", or ".join(filter(None, (command_line(args), "more memory for the KV pool"))),
        evidence=evidence,
    )


SURELY_LARGE = 4096
"""Minimum prefill chunk, in tokens, with which the fixed cost of a prefill pass is small on any GPU."""
LIKE_A_STEP = 512
"""A prefill pass of at most this many tokens takes about as long as a decode step, because both read the
weights once and compute little."""
LEAST_INTERVAL = 2
"""Minimum `--prefill-decode-interval` that pays, in decode steps."""
FEWER_PASSES = 1.25
"""`--prefill-decode-interval` pays if it reduces the number of passes by at least this factor."""
LARGE_TP = 4
"""Minimum tensor parallelism at which larger CUDA graphs pay (SGLang's tuning guides)."""


def running_low(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that few requests run, because full prefill passes admit requests only as fast as others end."""
    if not frequent(situation.load, "far_below") or situation.fills_up:
        return None
    # At a higher conservativeness, the rule `conservative` advises first.
    if conservativeness(situation) > LESS_CONSERVATIVE:
        return None
    prefills = situation.log.prefills
    if prefills.passes < GUIDES.samples or not is_frequent(prefills.filled / max(1, prefills.passes)):
        return None
    return Finding(
        f"{situation.load.median('running'):.0f} of at most {situation.max_running} requests run, others "
        f"wait and memory is free {situation.often('far_below')}: full prefill passes admit requests only as "
        "fast as others end",
        args=with_memory("chunk-full", "chunked-prefill-size", situation.server, flags),
        evidence=situation.evidence("far_below"),
    )


def prefill_full(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that many prefill passes fill a small chunk, so that their fixed cost is paid too often."""
    prefills = situation.log.prefills
    share = prefills.filled_waiting / max(1, prefills.passes)
    if prefills.passes < GUIDES.samples or not is_frequent(share):
        return None
    chunk = int(situation.server.value_of("chunked-prefill-size") or 0)
    if chunk >= SURELY_LARGE:
        return None
    return Finding(
        f"{share:.0%} of {prefills.passes} prefill passes take a whole chunk ({chunk} tokens) and requests "
        "still wait",
        args=with_memory("chunk-full", "chunked-prefill-size", situation.server, flags),
        evidence={"passes": prefills.passes, "full_waiting_share": round(share, 4)},
    )


def small_prefills(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that decoding often stops for prefill passes of few tokens."""
    name = "prefill-decode-interval"
    prefills, chunk = situation.log.prefills, situation.facts.chunk or 0
    # The flag is advised only if the server's SGLang surely has it.
    if name not in flags.names or not has_enough(situation.log):
        return None
    args = next_setting("small-prefills", name, situation.server, flags)
    if not args:
        return None
    # With mixed chunks, prefill passes decode too, so they delay nothing.
    if situation.facts.arguments.get("enable_mixed_chunk"):
        return None
    mean_tokens = prefills.new_tokens / max(1, prefills.passes)
    are_small = mean_tokens <= min(GUIDES.small_pass * chunk, LIKE_A_STEP)
    # With an empty queue, passes are small because requests arrive one by one.
    if prefills.passes < GUIDES.samples or not are_small or frequent(situation.load, "empty"):
        return None
    steps, interval = situation.decode_steps, args[name]
    saves_passes = _saves_passes(
        prefills=prefills.passes, steps=steps, output_tokens=situation.server.output_tokens, interval=interval
    )
    if interval < LEAST_INTERVAL or not saves_passes:
        return None
    steps_per_pass = steps / prefills.passes
    return Finding(
        f"a prefill pass of {mean_tokens:.0f} tokens on average follows every {steps_per_pass:.1f} decode "
        "steps: slots are filled one by one, and each pass has a fixed cost",
        args=args,
        evidence={"passes": prefills.passes},
    )


def _saves_passes(*, prefills: int, steps: float, output_tokens: float, interval: int) -> bool:
    """Tell whether one prefill pass every `interval` decode steps would clearly reduce the number of passes.

    With such an interval, the slot of a finished request stays empty for half an interval on average. So
    fewer slots decode, and more decode steps are needed.
    """
    if prefills * interval <= steps or not output_tokens:
        # The prefill passes are far enough apart already, or the output length is unknown.
        return False
    decoding_share = 1 - interval / 2 / output_tokens
    if decoding_share <= 0:
        return False
    # There are more decode steps, and one prefill pass for each interval of them.
    passes_with_interval = steps / decoding_share * (1 + 1 / interval)
    return prefills + steps >= FEWER_PASSES * passes_with_interval


def long_prompts(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that one or two prompts fill a prefill pass."""
    prefills = situation.log.prefills
    share = prefills.few_long / max(1, prefills.passes)
    if prefills.passes < GUIDES.samples or not is_frequent(share):
        return None
    if prefills.mean_prompt < GUIDES.long_prompt:
        return None
    args = with_memory("chunk-full", "chunked-prefill-size", situation.server, flags)
    args |= next_setting("chunk-full", "cuda-graph-backend-prefill", situation.server, flags)
    return Finding(
        f"one or two prompts fill the pass in {share:.0%} of {prefills.passes} prefill passes "
        f"({prefills.mean_prompt:,.0f} tokens each): long prompts dominate",
        args=args,
        evidence={"passes": prefills.passes, "few_long_share": round(share, 4)},
    )


def cuda_graph(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that decoding runs without CUDA graphs, although they matter at its batch sizes."""
    # Small models and large tensor parallelism need CUDA graphs for larger batches, so each has its own sign.
    sign = "no_graph"
    if 0 < (situation.facts.weights_gb or 0) <= GUIDES.launched_gb:
        sign = "no_graph_small"
    elif situation.facts.tp >= LARGE_TP:
        sign = "no_graph_tp"
    batches = [sample.running for sample in situation.log.samples if SIGNS[sign](sample)]
    share = len(batches) / max(1, situation.log.counted)
    if not has_enough(situation.log) or not is_frequent(share):
        return None
    running = median(batches)
    captured = situation.facts.graph_max_bs
    if situation.facts.graph_disabled:
        cause = "the server's arguments switch CUDA graphs off"
        if situation.facts.arguments.get("disable_cuda_graph"):
            # This older flag would override the new one, so it is removed.
            args = {"disable-cuda-graph": None}
        else:
            args = next_setting("graph-off", "cuda-graph-backend-decode", situation.server, flags)
    else:
        batch_sizes = f"batches of up to {captured} requests" if captured else "smaller batches"
        cause = f"CUDA graphs are captured only for {batch_sizes}"
        # The new value must cover the batches that ran without a graph.
        server = replace(situation.server, running=running)
        args = with_memory("graph-off", "cuda-graph-max-bs-decode", server, flags)
    return Finding(
        f"decoding runs without a CUDA graph (`cuda graph: False`) in {share:.0%} of "
        f"{span_in_words(situation.log)}, with {running:.0f} running requests: {cause}",
        args=args,
        evidence={**situation.evidence(), "no_graph_share": round(share, 4)},
        certainty="high" if situation.facts.graph_disabled else None,
    )


FEWEST_ANSWERS = 100
"""Minimum number of answers on which the gain of n-gram speculation is predicted."""


def answers_repeat(situation: Situation, flags: Flags) -> Finding | None:
    """Detect that answers repeat each other so much that drafts from earlier answers would save time."""
    answers = situation.client.answers if situation.client else 0
    if answers < FEWEST_ANSWERS or not has_enough(situation.load):
        return None
    server = situation.server
    args = with_companions("repeated", NGRAM, server, flags)
    if not args:
        return None
    figures = {"tokens_a_step": round(server.repeated, 2), "speedup": round(server.ngram_speedup, 2)}
    return Finding(
        f"{answers} answers repeat text of each other: with drafts from earlier answers, a decode step would "
        f"yield {server.repeated:.1f} tokens per request, and the {server.running:.0f} running requests "
        f"would together get {server.ngram_speedup:.1f} times as many tokens/s",
        args=args,
        evidence={**situation.evidence(), **figures},
    )
