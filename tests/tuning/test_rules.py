"""Each failure in a log of SGLang has its remedy, and no two remedies contradict each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchrunner.sglang.flags import Flags, installed
from batchrunner.sglang.logs.reader import LogReader
from batchrunner.tuning.rules import RULES, apply_all
from batchrunner.tuning.signals import GUIDES
from batchrunner.tuning.situation import Situation
from tests.conftest import ROOT, require_engine
from tests.support.sglang_logs import FLAG_LOGS, LogWriter, advice_of, changes, cuda_oom, judged


def _of_model(log: LogWriter, name: str) -> LogWriter:
    log.lines = [line.replace("LlamaForCausalLM", name) for line in log.lines]
    return log


def _retracting(log: LogWriter) -> LogWriter:
    for _ in range(9):
        log.decode(4, u=0.99).retract()
    return log


def _in_bursts(log: LogWriter) -> LogWriter:
    for _ in range(9):
        log.decode(4, q=0, u=0.5).decode(4, q=4000)
    return log


STATES_CAP = (
    "max_running_requests is capped to 98 by the mamba state cache (max_mamba_cache_size=490, 5 state slots "
    "per request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the "
    "state size with --mamba-ssm-dtype bfloat16."
)
POOL_CAP = (
    "max_running_requests was reduced from the requested 4096 to 98 (per dp worker) due to the available KV "
    "cache capacity."
)
"""What SGLang 0.5.23 logs where memory allows fewer running requests than were asked for."""
POOLS = (
    "Mamba Cache is allocated. max_mamba_cache_size: 490, conv_state size: 0.60GB, ssm_state size: 23.40GB ",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 450000, K size: 13.33 GB, V size: 13.33 GB",
)


def hybrid(*, before_ready: Sequence[str] = (STATES_CAP,), most: int = 98, **arguments: Any) -> LogWriter:
    """Begin the log of a hybrid model whose state pool caps the running requests."""
    unset = dict.fromkeys(("max_mamba_cache_size", "mamba_full_memory_ratio", "mamba_ssm_dtype"))
    strategy = {"disable_radix_cache": False, "mamba_radix_cache_strategy": "extra_buffer"}
    return LogWriter().started(most=most, before_ready=before_ready, **{**unset, **strategy, **arguments})


FAILURES: dict[str, tuple[LogWriter, dict[str, str]]] = {
    "prefill, SGLang's line": (
        LogWriter().started().decode(9).prefill(2)
        .say("Prefill out of memory. Try to lower your batch size."),
        {"oom-prefill": "--chunked-prefill-size 4096"},
    ),
    "decode, torch's": (
        LogWriter().started().decode(9, r=400).say(cuda_oom("forward_decode")),
        {"oom-decode": "--max-running-requests 300"},
    ),
    "graph capture": (
        LogWriter().started().say("Capture cuda graph begin. This can take up to several minutes.")
        .say("Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB."),
        {"oom-graph": "--cuda-graph-max-bs 128 --mem-fraction-static 0.8"},
    ),
    "weights": (
        LogWriter().say("server_args=ServerArgs(model_path='/m', tp_size=2, mem_fraction_static=0.83)")
        .say("Load weight begin. avail mem=23.10 GB").say(cuda_oom("__init__")),
        {"oom-weights": "--tp-size 4, or a quantised model"},
    ),
    "no room for a pool": (
        LogWriter().say("server_args=ServerArgs(model_path='/m', tp_size=1, mem_fraction_static=0.5)")
        .say("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        {"oom-weights": "--mem-fraction-static 0.55, or more GPUs (--tp-size)"},
    ),
    "who knows where": (
        LogWriter().started(mem_fraction_static=0.75).say("Out of memory. Try to lower your batch size."),
        {"oom-general": "--mem-fraction-static 0.7"},
    ),
    "killed on a CPU": (
        LogWriter().started(device="cpu", max_total_tokens=20000).decode(30)
        .say("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."),
        {"killed": "--max-total-tokens 225000, or more host memory (of the machine, the container, or "
         "Slurm's --mem), if `dmesg` says `oom-kill`"},
    ),
    "crashed": (
        LogWriter().started().decode(30)
        .say("Scheduler hit an exception: Traceback (most recent call last):\n"
             '  File "/sglang/srt/managers/scheduler.py", line 3300, in run_scheduler_process\n'
             "RuntimeError: CUDA error: an illegal memory access was encountered")
        .say("SIGQUIT received. signum=None, frame=None. It usually means one child failed."),
        {"crashed": "look for this error in the log and in SGLang's issues: another release may not have "
         "it"},
    ),
    "memory left": (
        LogWriter().started(gpu_gb=13.5),
        {"memory-left": "--mem-fraction-static 0.91 instead of 0.83: 6.3 GB more for the KV pool "
         "(the GPU has 78 GB)"},
    ),
    "memory tight": (
        LogWriter().started(gpu_gb=4.64),
        {"memory-tight": "--mem-fraction-static 0.8 instead of 0.83: 2.4 GB less for the KV pool "
         "(the GPU has 78 GB)"},
    ),
    "memory tight, and it is the weights": (
        LogWriter().started(gpu_gb=0.5, card_gb=22, weights_gb=17.5), {},
    ),
    "graphs too small": (
        LogWriter().started().decode(30, r=400, g=False),
        {"cuda-graph": "--cuda-graph-max-bs 512"},
    ),
    "graphs disabled": (
        LogWriter().started(disable_cuda_graph=True).decode(30, g=False),
        {"cuda-graph": "without --disable-cuda-graph"},
    ),
    "capped": (
        LogWriter().started(most=64).decode(30, r=64, u=0.3),
        {"running-capped": "--max-running-requests 256"},
    ),
    "at the cap of a hybrid model's state pool": (
        hybrid().decode(30, r=98, u=0.3).prefill(60, hit=2000),
        {"states-full": "--mamba-radix-cache-strategy extra_buffer_lazy --mamba-full-memory-ratio 2.14, "
         "or --mamba-ssm-dtype bfloat16, which halves a state and changes answers a little",
         "shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
    ),
    "at the cap of a state pool, and no prefix is shared": (
        hybrid().decode(30, r=98, u=0.3).prefill(60),
        {"states-full": "--disable-radix-cache --mamba-full-memory-ratio 0.55, "
         "or --mamba-ssm-dtype bfloat16, which halves a state and changes answers a little"},
    ),
    "at the cap of a state pool whose size is set": (
        hybrid(max_mamba_cache_size=490, mamba_ssm_dtype="bfloat16", before_ready=(STATES_CAP, *POOLS))
        .decode(30, r=98, u=0.3).prefill(60, hit=2000),
        {"states-full": "--mamba-radix-cache-strategy extra_buffer_lazy --max-mamba-cache-size 704",
         "shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
    ),
    "at the cap of a state pool of a size that is not known": (
        LogWriter().started(most=98, before_ready=(STATES_CAP,)).decode(30, r=98, u=0.3),
        {"states-full": "--mamba-ssm-dtype bfloat16, which halves a state and changes answers a little"},
    ),
    "at the cap of a state pool, just below --max-running-requests": (
        hybrid(max_running_requests=100).decode(30, r=98, u=0.3).prefill(60, hit=2000),
        {"states-full": "--mamba-radix-cache-strategy extra_buffer_lazy --mamba-full-memory-ratio 2.14 "
         "--max-running-requests 176, or --mamba-ssm-dtype bfloat16, which halves a state and changes "
         "answers a little",
         "shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
    ),
    "at the cap of a state pool, far below --max-running-requests": (
        hybrid(max_running_requests=128).decode(30, r=98, u=0.3).prefill(60, hit=2000),
        {"states-full": "--mamba-radix-cache-strategy extra_buffer_lazy --mamba-full-memory-ratio 2.14 "
         "--max-running-requests 176, or --mamba-ssm-dtype bfloat16, which halves a state and changes "
         "answers a little",
         "shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
    ),
    "at the cap of a state pool that --max-running-requests sizes": (
        hybrid(disable_radix_cache=True, max_running_requests=490, before_ready=POOLS, most=490)
        .decode(30, r=490, u=0.3),
        {"states-full": "--max-mamba-cache-size 755 --max-running-requests 755"},
    ),
    "at the cap of a state pool of unknown memory that --max-running-requests sizes": (
        hybrid(disable_radix_cache=True, max_running_requests=490, before_ready=POOLS[:1], most=490)
        .decode(30, r=490, u=0.3),
        {"states-full": "a larger --max-running-requests, which also sets the number of states"},
    ),
    "at the cap of the state pool of a server that only decodes": (
        hybrid(disaggregation_mode="decode").decode(30, r=98, u=0.3).prefill(60, hit=2000),
        {"states-full": "--mamba-full-memory-ratio 2.71, or --mamba-ssm-dtype bfloat16, which halves a state "
         "and changes answers a little",
         "shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
    ),
    "below the cap of a state pool": (hybrid().decode(30, r=60, u=0.95), {}),
    "EAGLE with a fixed number of guesses": (
        LogWriter().started(speculative_algorithm="EAGLE3", speculative_eagle_topk=1,
                            speculative_adaptive=False).decode(30),
        {"fixed-guesses": "--speculative-adaptive"},
    ),
    "an n-gram server": (
        LogWriter().started(speculative_algorithm="NGRAM", speculative_adaptive=False).decode(30), {},
    ),
    "at the cap of the KV pool": (
        LogWriter().started(most=98, before_ready=(POOL_CAP,)).decode(30, r=98, u=0.3), {},
    ),
    "at a cap that an earlier start had": (
        LogWriter().started(most=98, before_ready=(STATES_CAP,)).started(most=64).decode(30, r=64, u=0.3),
        {"running-capped": "--max-running-requests 256"},
    ),
    "at the cap, and the pool is full in waves": (
        LogWriter().started(most=64).decode(12, r=64, u=0.6).decode(18, r=64, u=0.97), {},
    ),
    "retracting, as conservative as can be": (
        _retracting(LogWriter().started(schedule_conservativeness=1.43)),
        {"retractions": "--max-running-requests 209, or more memory for the KV pool"},
    ),
    "few running, not conservative": (
        LogWriter().started(schedule_conservativeness=0.3).decode(30, r=100, u=0.5).prefill(new=8192),
        {"running-low": "--chunked-prefill-size 16384 --mem-fraction-static 0.7",
         "conservative": "a max_new_tokens closer to real output lengths"},
    ),
    "long prompts in small chunks": (
        LogWriter().started(chunk=1024).decode(30).prefill(60, n=1, new=1024),
        {"prefill-full": "--chunked-prefill-size 2048"},
    ),
    "prefixes, other clients": (
        LogWriter().started().decode(30, q=100).prefill(30, new=3000, hit=1000),
        {"shared-prefixes": "--schedule-policy lpm"},
    ),
    "prefixes that fall out": (
        LogWriter().started().decode(30, q=400).prefill(30, n=2, new=3000, hit=1000),
        {"shared-prefixes": "send requests that begin alike one after another, as batchrun does",
         "host-cache": "--enable-hierarchical-cache"},
    ),
    "metrics off": (
        LogWriter().started(enable_metrics=False, enable_cache_report=False).decode(30),
        {"metrics-off": "--enable-metrics --enable-cache-report"},
    ),
    "bursts": (
        _in_bursts(LogWriter()),
        {"queue-deep": "send requests evenly, not in bursts: keep 100-2000 requests waiting"},
    ),
    "several replicas in one server": (
        LogWriter().started(dp_size=4).decode(30),
        {"data-parallel": "4 servers instead (`engine.replicas`)"},
    ),
    "a model that fits one GPU": (
        LogWriter().started(tp_size=2).decode(30),
        {"tensor-parallel": "a server for each GPU (`engine: {replicas: auto}`), with --tp-size 1"},
    ),
    "DeepSeek on eight GPUs": (
        LogWriter().started(tp_size=8, gpu_gb=7).say(
            "Load weight end. elapsed=90 s, type=DeepseekV3ForCausalLM, avail mem=1.0 GB, mem usage=75.00 GB."
        ).decode(30),
        {"expert-parallel": "--ep-size 8", "dp-attention": "--enable-dp-attention --dp-size 8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_has_its_remedy(failure: str, tmp_path: Path) -> None:
    """Where memory ran out, or what limits, decides what is changed, and to which value."""
    log, expected = FAILURES[failure]
    assert changes(judged(log.text(), tmp_path)) == expected


TOGETHER: dict[str, tuple[LogWriter, set[str]]] = {
    "long prompts take what is left": (
        LogWriter().started(gpu_gb=13.5).decode(30).prefill(30, n=1, new=8192), {"long-prompts"},
    ),
    "prefill ran out, though much was left": (
        LogWriter().started(gpu_gb=13.5).decode(30)
        .say("Prefill out of memory. Try to lower your batch size."),
        {"oom-prefill"},
    ),
    "the host's memory ran out, and would hold prefixes": (
        LogWriter().started().decode(30).prefill(60, n=2, new=3000, hit=1500)
        .say("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."),
        {"killed", "shared-prefixes"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_one_advice_takes_another_away(case: str, tmp_path: Path) -> None:
    """What would undo an advice that matters more is not said beside it."""
    log, expected = TOGETHER[case]
    assert set(changes(judged(log.text(), tmp_path))) == expected


@pytest.mark.parametrize("first", FAILURES)
def test_no_flag_is_given_two_values(first: str) -> None:
    """Whatever comes together in one log, what is advised can be done all at once."""
    for second, (log, _) in FAILURES.items():
        reader = LogReader()
        for line in FAILURES[first][0].lines + [line for line in log.lines if "server_args" not in line]:
            reader.take(line)
        given: dict[str, Any] = {}
        for advice in apply_all(Situation(reader.series, reader.series, reader.facts), Flags()):
            for flag, value in advice.args.items():
                assert given.setdefault(flag, value) == value, (second, advice.rule, flag, given)


@pytest.mark.parametrize(
    ("card", "model", "arguments", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "Llama", {}, {"fp8-weights", "fp8-cache"}),
        ("H200", "Llama", {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}, set()),
        ("A100", "Llama", {"attention_backend": "triton"}, {"attention-backend"}),
        ("NVIDIA B200", "Llama", {"attention_backend": "flashinfer", "quantization": "fp8"},
         {"attention-backend", "fp8-cache"}),
        ("A100", "GptOssForCausalLM", {"attention_backend": "triton"}, set()),
    ],
)  # fmt: skip
def test_the_card_and_the_model_decide(
    card: str, model: str, arguments: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    """Precision and kernels are advised by the card's generation, but where SGLang chooses itself."""
    text = _of_model(LogWriter().started(**arguments).decode(30), model).text()
    assert set(changes(judged(text, tmp_path, card=card))) == expected
    assert set(changes(judged(text, tmp_path))) == set()


@pytest.mark.parametrize(
    ("card", "arguments", "beside"),
    [
        ("L40S", {}, "--kv-cache-dtype fp8_e4m3 or --quantization fp8, with a lower --mem-fraction-static"),
        ("H200", {"kv_cache_dtype": "fp8_e5m2"}, "--quantization fp8, with a lower --mem-fraction-static"),
        ("A100-SXM4-80GB", {}, "a model quantised to int8 or AWQ, with a lower --mem-fraction-static"),
        ("A100-SXM4-80GB", {"quantization": "awq"}, ""),
    ],
)
def test_smaller_numbers_are_named(card: str, arguments: dict[str, Any], beside: str, tmp_path: Path) -> None:
    """Who ran out of memory hears of the smaller numbers that the card has, beside the flag of the guides."""
    log = (
        LogWriter().started(**arguments).decode(9).say("Decode out of memory. Try to lower your batch size.")
    )
    found = changes(judged(log.text(), tmp_path, card=card))
    (change,) = (change for rule, change in found.items() if rule.startswith("oom-"))
    first, _, rest = change.partition(", or ")
    assert first.startswith("--")
    assert rest == beside


def test_a_small_model_at_small_batches_is_compiled(tmp_path: Path) -> None:
    """torch.compile is for small models at small batches, of which both must be seen."""
    small = LogWriter().started().text().replace("mem usage=15.10", "mem usage=2.50")
    few, many = LogWriter().decode(30, r=8).text(), LogWriter().decode(30, r=233).text()
    assert set(changes(judged(small + few, tmp_path))) == {"torch-compile"}
    assert set(changes(judged(small + many, tmp_path))) == set()


def named(log: LogWriter, config: dict[str, Any] | None = None, **client: Any) -> dict[str, dict[str, Any]]:
    """Return the flags that each rule names to a run with this log, whose model has this config.json."""
    reader = LogReader()
    for line in log.lines:
        reader.take(line)
    reader.facts.config = config or {}
    return {advice.rule: advice.args for advice in advice_of(reader, **client)}


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A token of its KV pool takes 2 · 2 · 2 · 16 numbers of 4 bytes: 512 bytes."""


def on_cpu(free_gb: float = 8.0, device: str = "cpu") -> LogWriter:
    """Return the log of a server whose KV pool has 2,000 tokens for at most 128 requests."""
    log = LogWriter().started(device=device, most=128, max_total_tokens=2000)
    ready = log.lines[-1].replace("max_total_num_tokens=450000", "max_total_num_tokens=2000")
    log.lines[-1] = ready.replace("available_gpu_mem=7.20", f"available_cpu_mem={free_gb}")
    return log


@pytest.mark.parametrize(
    ("log", "reserved", "config", "pool"),
    [
        (on_cpu().decode(30, r=32, u=0.95), False, LLAMA, 8000),
        (on_cpu().decode(30, r=8, u=0.95), False, LLAMA, 16_000),
        (on_cpu(free_gb=0.01).decode(30, r=8, u=0.95), False, LLAMA, 2000 + int(0.01 * 2**30 / 4 / 512)),
        (on_cpu().decode(30, r=8, u=0.95), False, {}, 4000),
        (on_cpu().prefill(9, n=1, new=24).decode(30, r=32, u=0.64), True, LLAMA, 8000),
        (on_cpu().decode(30, r=32, u=0.95, q=0), False, LLAMA, None),
        (on_cpu(device="cuda").decode(30, r=32, u=0.95), False, LLAMA, None),
    ],
    ids=[
        "for all places", "eight times at most", "for the memory", "of an unknown model",
        "reserved in full", "nothing waits", "a GPU",
    ],
)  # fmt: skip
def test_a_small_pool_is_made_larger(
    log: LogWriter, config: dict[str, Any], pool: int | None, *, reserved: bool
) -> None:
    """By places that are empty, memory that is free, and at most eight times at once."""
    found = named(log, config, ignore_eos=reserved, outputs=600, output_tokens=600 * 60)
    assert found.get("pool-small", {}).get("max-total-tokens") == pool


def test_a_pool_of_unknown_size_gets_no_advice() -> None:
    """A log of a server on a CPU that lacks the line with the pool's size still gets the other advice."""
    log = LogWriter().started(device="cpu", max_running_requests=128)
    log.lines.pop()
    assert "pool-small" not in named(log.decode(30, r=32, u=0.95))


SHORT = {"outputs": 600, "output_tokens": 24_000}


@pytest.mark.parametrize(
    ("rule", "log", "client", "change"),
    [
        ("cache-off", "radix_off", {"possible_share": 0.8}, {"disable-radix-cache": None}),
        ("cache-off", "radix_off", {"possible_share": 0.05}, None),
        ("order-of-server", "policy_random", {"possible_share": 0.9}, {"schedule-policy": "fcfs"}),
        ("order-of-server", "policy_random", {"possible_share": 0.7}, None),
        ("pages-large", "page_size", {"ignore_eos": True, **SHORT}, {"page-size": 1}),
        ("pages-large", "page_size", SHORT, None),
        ("small-prefills", "small_chunk", {}, {"chunked-prefill-size": 2048}),
    ],
)  # fmt: skip
def test_a_bad_flag_of_the_real_engine_is_named_first(
    rule: str,
    log: str,
    client: dict[str, Any],
    change: dict[str, Any] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its own log: not where nothing is shared, the cache has nearly all, or outputs are long."""
    monkeypatch.setattr(GUIDES, "samples", 0)  # these logs are thinned out
    monkeypatch.setattr(GUIDES, "span_s", 0)
    found = advice_of(LogReader().read(FLAG_LOGS / f"{log}.log"), **client)
    assert (found[0].args if change else [a.rule for a in found].count(rule)) == (change or 0)


@pytest.mark.engine
@pytest.mark.long
def test_the_installed_server_takes_every_flag() -> None:
    """Whatever the rules say to the installed release is a flag of its --help, with a value it takes."""
    require_engine("sglang")
    flags, said = installed(), set()
    for log, _ in FAILURES.values():
        reader = LogReader()
        for line in log.lines:
            reader.take(line)
        reader.facts.card = "H100"
        for advice in apply_all(Situation(reader.series, reader.series, reader.facts), flags):
            for name, value in advice.args.items():
                assert name in flags.names
                assert str(value) in flags.choices.get(name, {str(value)})
                said.add(name)
    assert {"cuda-graph-max-bs-decode", "attn-dp-size", "mem-fraction-static", "kv-cache-dtype"} <= said


def test_each_rule_has_its_test() -> None:
    """A test names the rule that it is about."""
    files = [*(ROOT / "tests" / "tuning").glob("test_*.py"), ROOT / "tests" / "runner" / "test_advise.py"]
    tests = "".join(path.read_text() for path in files)
    assert [rule.name for rule in RULES if f'"{rule.name}"' not in tests] == []
