"""Each failure in a log of SGLang has its remedy, and no two remedies contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchrunner.advise.rules import RULES, apply_all
from batchrunner.advise.situation import Situation
from batchrunner.engines.flags import Flags, installed
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.series import Thresholds
from tests.conftest import ROOT, require_engine
from tests.support.advice import changes, cuda_oom, judged
from tests.support.sglang_logs import LogWriter

if TYPE_CHECKING:
    from pathlib import Path


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


FAILURES: dict[str, tuple[LogWriter, dict[str, str]]] = {
    "prefill, SGLang's line": (
        LogWriter().started().decode(9).prefill(2)
        .say("Prefill out of memory. Try to lower your batch size."),
        {"oom-prefill": "--chunked-prefill-size 4096"},
    ),
    "prefill, the second time": (
        LogWriter().started(chunk=4096).decode(9).prefill(2).say(cuda_oom("forward_extend")),
        {"oom-prefill": "--chunked-prefill-size 2048"},
    ),
    "prefill, at the last chunk": (
        LogWriter().started(chunk=2048).decode(9).prefill(2).say(cuda_oom("forward_extend")),
        {"oom-prefill": "--mem-fraction-static 0.8"},
    ),
    "decode, SGLang's line": (
        LogWriter().started().decode(9, r=400).say("Decode out of memory. Try to lower your batch size."),
        {"oom-decode": "--max-running-requests 300"},
    ),
    "decode, torch's": (
        LogWriter().started().decode(9, r=400).say(cuda_oom("forward_decode")),
        {"oom-decode": "--max-running-requests 300"},
    ),
    "request slots": (
        LogWriter().started(most=64).decode(9, r=60).say(
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
            "`--max-running-requests`."),
        {"oom-decode": "--max-running-requests 45"},
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
    "weights that are quantised": (
        LogWriter().say("server_args={'model_path': '/m', 'tp_size': 1, 'quantization': 'fp8'}")
        .say("Load weight begin. avail mem=23.10 GB").say(cuda_oom("__init__")),
        {"oom-weights": "--tp-size 2"},
    ),
    "weights on a CPU": (
        LogWriter().say("server_args={'model_path': '/m', 'tp_size': 1, 'device': 'cpu'}")
        .say("Load weight begin. avail mem=20.00 GB")
        .say("RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        {"oom-weights": "a machine with more memory, or a quantised model"},
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
        {"killed": "--max-total-tokens 225000, or more memory for it (the machine's, the container's or "
         "Slurm's --mem), if `dmesg` says `oom-kill`"},
    ),
    "killed beside a GPU": (
        LogWriter().started(enable_hierarchical_cache=True).say(
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 "
            "(SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."),
        {"killed": "more memory for it (the machine's, the container's or Slurm's --mem), if `dmesg` says "
         "`oom-kill`, or a smaller --hicache-ratio"},
    ),
    "crashed": (
        LogWriter().started().decode(30)
        .say("Scheduler hit an exception: Traceback (most recent call last):\n"
             '  File "/sglang/srt/managers/scheduler.py", line 3300, in run_scheduler_process\n'
             "RuntimeError: CUDA error: an illegal memory access was encountered")
        .say("SIGQUIT received. signum=None, frame=None. It usually means one child failed."),
        {"crashed": "look for that error in the log and among SGLang's issues: another release may not have "
         "it"},
    ),
    "graphs that fail for another reason": (
        LogWriter().started().say(
            "Exception: Capture cuda graph failed: [Errno 2] No such file or directory: 'ninja'"),
        {"crashed": "look for that error in the log and among SGLang's issues: another release may not have "
         "it"},
    ),
    "memory left": (
        LogWriter().started(gpu_gb=13.5),
        {"memory-left": "--mem-fraction-static 0.91 (from 0.83: 6.3 GB of 78 more for the KV pool)"},
    ),
    "memory left by a limit": (
        LogWriter().started(gpu_gb=40, max_total_tokens=20000),
        {"memory-left": "without --max-total-tokens"},
    ),
    "memory tight": (
        LogWriter().started(gpu_gb=4.64),
        {"memory-tight": "--mem-fraction-static 0.8 (from 0.83: 2.4 GB of 78 less for the KV pool)"},
    ),
    "memory tight, on a small card": (
        LogWriter().started(gpu_gb=2.0, card_gb=22),
        {"memory-tight": "--mem-fraction-static 0.75 (from 0.83: 1.8 GB of 22 less for the KV pool)"},
    ),
    "memory tight, on a tiny card": (
        LogWriter().started(gpu_gb=0.6, card_gb=5, weights_gb=1),
        {"memory-tight": "--mem-fraction-static 0.78 (from 0.83: 0.2 GB of 5 less for the KV pool)"},
    ),
    "memory enough, for a small card": (LogWriter().started(gpu_gb=3.2, card_gb=22), {}),
    "memory tight, and it is the weights": (
        LogWriter().started(gpu_gb=0.5, card_gb=22, weights_gb=17.5), {},
    ),
    "memory for a large chunk": (LogWriter().started(gpu_gb=20, card_gb=178, chunk=16384), {}),
    "graphs too small": (
        LogWriter().started().decode(30, r=400, g=False),
        {"cuda-graph": "--cuda-graph-max-bs 512"},
    ),
    "graphs too small, at a large tp": (
        LogWriter().started(tp_size=8, gpu_gb=5.1).decode(30, r=700, g=False),
        {"cuda-graph": "--cuda-graph-max-bs 768 --mem-fraction-static 0.81"},
    ),
    "graphs too small for what is too large for them": (
        LogWriter().started(most=2048).decode(70, r=100).decode(30, r=600, g=False), {},
    ),
    "graphs disabled": (
        LogWriter().started(disable_cuda_graph=True).decode(30, g=False),
        {"cuda-graph": "without --disable-cuda-graph"},
    ),
    "capped": (
        LogWriter().started(most=64).decode(30, r=64, u=0.3),
        {"running-capped": "--max-running-requests 192"},
    ),
    "few places, one of which is being filled": (
        LogWriter().started(most=8).decode(20, r=7, u=0.3).decode(10, r=6, u=0.3),
        {"running-capped": "--max-running-requests 24"},
    ),
    "capped, and no ready line": (
        LogWriter().say("server_args={'max_running_requests': 8, 'schedule_conservativeness': 1.0}")
        .decode(30, r=8, u=0.6),
        {"running-capped": "--max-running-requests 9"},
    ),
    "at the cap, and the pool is full in waves": (
        LogWriter().started(most=64).decode(12, r=64, u=0.6).decode(18, r=64, u=0.97), {},
    ),
    "capped, DP attention": (
        LogWriter().started(most=64, attn_dp_size=8, max_running_requests=512).decode(30, r=64, u=0.4),
        {"running-capped": "--max-running-requests 1152"},
    ),
    "few running under DP attention, whose 0.3 is SGLang's own": (
        LogWriter().started(chunk=1024, attn_dp_size=8, schedule_conservativeness=0.3, weights_gb=60)
        .decode(30, r=100, u=0.5).prefill(new=1024),
        {"conservative": "a max_new_tokens nearer to real outputs"},
    ),
    "as bold as can be": (
        LogWriter().started(schedule_conservativeness=0).decode(30, u=0.5),
        {"conservative": "a max_new_tokens nearer to real outputs"},
    ),
    "retracting under DP attention": (
        _retracting(LogWriter().started(attn_dp_size=8, schedule_conservativeness=0.9)),
        {"retractions": "--schedule-conservativeness 3.9"},
    ),
    "retracting, more conservative": (
        _retracting(LogWriter().started(schedule_conservativeness=1.3)),
        {"retractions": "--schedule-conservativeness 1.43"},
    ),
    "retracting, as conservative as can be": (
        _retracting(LogWriter().started(schedule_conservativeness=1.43)),
        {"retractions": "--max-running-requests 209, or more memory for the KV pool"},
    ),
    "few running, not conservative": (
        LogWriter().started(schedule_conservativeness=0.3).decode(30, r=100, u=0.5).prefill(new=8192),
        {"running-low": "--chunked-prefill-size 16384 --mem-fraction-static 0.7",
         "conservative": "a max_new_tokens nearer to real outputs"},
    ),
    "long prompts": (
        LogWriter().started(gpu_gb=9.9, chunk=1024).decode(30).prefill(30, n=1, new=1024, hit=1500),
        {"long-prompts": "--chunked-prefill-size 2048"},
    ),
    "long prompts in small chunks": (
        LogWriter().started(chunk=1024).decode(30).prefill(60, n=1, new=1024),
        {"prefill-full": "--chunked-prefill-size 2048"},
    ),
    "short prompts that fill small chunks": (
        LogWriter().started(chunk=512).decode(30).mixed_prefill(30, n=1, new=512),
        {"prefill-full": "--chunked-prefill-size 1024"},
    ),
    "short prompts that fill chunks as large as they should be": (
        LogWriter().started(chunk=4096).decode(30).mixed_prefill(30, n=8, new=4096), {},
    ),
    "long prompts, and the largest chunk": (
        LogWriter().started(chunk=16384).decode(30).prefill(30, n=1, new=16384), {},
    ),
    "long prompts, and no room but the weights'": (
        LogWriter().started(weights_gb=60).decode(30).prefill(30, n=1, new=8192), {},
    ),
    "slow tokens": (
        LogWriter().started().decode(30, r=300, p=900),
        {"latency-high": "--max-running-requests 150, only if somebody waits for single answers"},
    ),
    "prefixes, other clients": (
        LogWriter().started().decode(30, q=100).prefill(30, new=3000, hit=1000),
        {"shared-prefixes": "--schedule-policy lpm"},
    ),
    "prefixes, a long queue": (
        LogWriter().started(schedule_policy="lpm").decode(30, q=400).prefill(30, new=3000, hit=1000),
        {"shared-prefixes": "send requests that begin alike one after another, as batchrun does"},
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
        _in_bursts(LogWriter()), {"queue-deep": "send requests evenly, not in bursts: keep 100-2000 waiting"},
    ),
    "several replicas in one server": (
        LogWriter().started(dp_size=4).decode(30),
        {"data-parallel": "4 servers behind SGLang's Model Gateway instead"},
    ),
    "a model that fits one GPU": (
        LogWriter().started(tp_size=2).decode(30),
        {"tensor-parallel": "2 servers behind SGLang's Model Gateway, each with --tp-size 1"},
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
    "decode ran out at the cap": (
        LogWriter().started(most=64).decode(30, r=64, u=0.3)
        .say("Decode out of memory. Try to lower your batch size."),
        {"oom-decode"},
    ),
    "slow at the cap": (LogWriter().started(most=128).decode(30, r=128, u=0.5, p=500), {"running-capped"}),
    "at the cap, or just below where rows have ended": (
        LogWriter().started(most=32).decode(30, r=32, q=9, u=0.3).decode(20, r=29, q=9, u=0.3),
        {"running-capped"},
    ),
    "tight, and graphs too small": (
        LogWriter().started(gpu_gb=3).decode(30, r=400, g=False), {"memory-tight"},
    ),
    "prefill ran out of one of two GPUs, where one would do": (
        LogWriter().started(tp_size=2, weights_gb=3).decode(30, r=8)
        .say("Prefill out of memory. Try to lower your batch size."),
        {"oom-prefill"},
    ),
    "the host's memory ran out, and would hold prefixes": (
        LogWriter().started().decode(30).prefill(60, n=2, new=3000, hit=1500)
        .say("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."),
        {"killed", "shared-prefixes"},
    ),
    "retracting, with long prompts": (
        _retracting(LogWriter().started(chunk=4096)).prefill(30, n=1, new=4096), {"retractions"},
    ),
    "experts that fit one GPU": (
        _of_model(LogWriter().started(tp_size=4, weights_gb=8), "Qwen3MoeForCausalLM").decode(30),
        {"tensor-parallel"},
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
        reader = LogReader(Thresholds())
        for line in FAILURES[first][0].lines + [line for line in log.lines if "server_args" not in line]:
            reader.take(line)
        given: dict[str, Any] = {}
        for advice in apply_all(Situation(reader.series, reader.series, reader.facts), Flags()):
            for flag, value in advice.args.items():
                assert given.setdefault(flag, value) == value, (second, advice.rule, flag, given)


@pytest.mark.parametrize(
    ("card", "arguments", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", {}, {"fp8-weights", "fp8-cache"}),
        ("A100-SXM4-80GB", {"attention_backend": "triton"}, {"attention-backend"}),
        ("NVIDIA B200", {"attention_backend": "flashinfer", "quantization": "fp8"},
         {"attention-backend", "fp8-cache"}),
        ("L40S", {"attention_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
         set()),
        ("B200", {"quantization": "fp8", "kv_cache_dtype": "nvfp4"}, set()),
        ("H200", {"quantization": "fp8", "kv_cache_dtype": "bfloat16"}, {"fp8-cache"}),
        ("H200", {"attention_backend": "flashinfer", "quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"},
         {"attention-backend"}),
    ],
)  # fmt: skip
def test_the_card_decides(card: str, arguments: dict[str, Any], expected: set[str], tmp_path: Path) -> None:
    """Precision and kernels are advised by the card's generation, and only where that is known."""
    text = LogWriter().started(**arguments).decode(30).text()
    assert set(changes(judged(text, tmp_path, card=card))) == expected
    assert set(changes(judged(text, tmp_path))) == set()


FP8_BOTH = "--kv-cache-dtype fp8_e4m3 or --quantization fp8, with a lower --mem-fraction-static"


@pytest.mark.parametrize("died", ["Prefill out", "Decode out", "Out"])
@pytest.mark.parametrize(
    ("card", "arguments", "beside"),
    [
        ("NVIDIA H100 80GB HBM3", {}, FP8_BOTH),
        ("L40S", {}, FP8_BOTH),
        ("NVIDIA B200", {}, FP8_BOTH),
        ("H200", {"quantization": "fp8"}, "--kv-cache-dtype fp8_e4m3, with a lower --mem-fraction-static"),
        ("H200", {"kv_cache_dtype": "fp8_e5m2"}, "--quantization fp8, with a lower --mem-fraction-static"),
        ("H200", {"kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"}, None),
        ("A100-SXM4-80GB", {}, "a model quantised to int8 or AWQ, with a lower --mem-fraction-static"),
        ("A100-SXM4-80GB", {"quantization": "awq"}, None),
        ("Tesla V100", {}, None),
    ],
)
def test_smaller_numbers_are_named(
    card: str, arguments: dict[str, Any], beside: str | None, died: str, tmp_path: Path
) -> None:
    """Who ran out of memory hears of the smaller numbers that the card has, beside the flag of the guides."""
    log = LogWriter().started(**arguments).decode(9)
    situation = judged(log.say(f"{died} of memory. Try to lower your batch size.").text(), tmp_path).situation
    situation.facts.card = card
    (change,) = (a.change for a in apply_all(situation, Flags()) if a.rule.startswith("oom-"))
    first, _, rest = change.partition(", or ")
    assert first.startswith("--")
    assert rest == (beside or "")


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [
        ("A100", "GptOssForCausalLM", set()),
        ("H100", "GptOssForCausalLM", set()),
        ("L40S", "DeepseekV2ForCausalLM", set()),
        ("H100", "DeepseekV2ForCausalLM", {"attention-backend"}),
        ("A100", "Qwen2ForCausalLM", {"attention-backend"}),
    ],
)
def test_a_model_may_need_its_backend(card: str, model: str, expected: set[str], tmp_path: Path) -> None:
    """Some models get triton from SGLang itself: another backend may be refused."""
    log = _of_model(LogWriter().started(attention_backend="triton", quantization="fp8"), model)
    found = judged(log.text(), tmp_path, card=card)
    assert set(changes(found)) == expected
    assert {advice.certainty for advice in found.advice if advice.change} <= {"low"}


@pytest.mark.parametrize("told", ["quant=fp8, fmt=e4m3, ", "quant=awq, bits=4, ", "dtype=torch.float16, "])
def test_weights_may_be_quantised_already(told: str, tmp_path: Path) -> None:
    """A checkpoint is quantised by its own config.json: the log says so, or is too old to say."""
    log = LogWriter().started().decode(30)
    plain, other = log.text(), log.text().replace("LlamaForCausalLM, ", f"LlamaForCausalLM, {told}")
    assert set(changes(judged(plain, tmp_path, card="H100"))) == {"fp8-weights", "fp8-cache"}
    assert set(changes(judged(other, tmp_path, card="H100"))) == {"fp8-cache"}


def test_a_small_model_at_small_batches_is_compiled(tmp_path: Path) -> None:
    """torch.compile is for small models at small batches, of which both must be seen."""
    small = LogWriter().started().text().replace("mem usage=15.10", "mem usage=2.50")
    few, many = LogWriter().decode(30, r=8).text(), LogWriter().decode(30, r=233).text()
    assert set(changes(judged(small + few, tmp_path))) == {"torch-compile"}
    assert set(changes(judged(small + many, tmp_path))) == set()


@pytest.mark.engine
def test_the_installed_server_takes_every_flag(tmp_path: Path) -> None:
    """Whatever the rules say to the installed release is a flag of its --help, with a value it takes."""
    require_engine("sglang")
    flags, said = installed(), set()
    for log, _ in FAILURES.values():
        for advice in apply_all(judged(log.text(), tmp_path, card="H100").situation, flags):
            for name, value in advice.args.items():
                assert name in flags.names
                assert str(value) in flags.choices.get(name, {str(value)})
                said.add(name)
    assert {"cuda-graph-max-bs-decode", "attn-dp-size", "mem-fraction-static", "kv-cache-dtype"} <= said


def test_each_rule_has_its_test() -> None:
    """A test names the rule that it is about."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "advise").rglob("test_*.py"))
    assert [rule.name for rule in RULES if f'"{rule.name}"' not in tests] == []
