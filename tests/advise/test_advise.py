"""What the signs of a server mean, and what to change: from logs of every generation, each failure."""

from __future__ import annotations

import json
import re
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.advise.advise import Judgement, advise
from batchrunner.advise.rules.table import RULES, apply_all, table
from batchrunner.advise.situation import Situation
from batchrunner.engines.flags import CHECK_HELP, Flags, installed, parse_help
from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.thresholds import Thresholds
from tests.conftest import ROOT, batchrun, require_engine
from tests.support.sglang_logs import GENERATIONS, LogWriter, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

LOGS = ROOT / "tests" / "support" / "logs"
README = ROOT / "README.md"
GUIDES = {  # verbatim: which guide, its line, what it reads
    "G2": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, "
            "gen throughput (token/s): 4594.01, #queue-req: 317"
        ),
        "median #running-req 233, #queue-req 317 (0 in 0%), token usage 0.82",
    ),
    "G3": (
        (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, "
            "gen throughput (token/s): 4594.01, #queue-req: 417"
        ),
        "median #running-req 233, #queue-req 417 (0 in 0%), token usage 0.82",
    ),
    "G4": (
        (
            "Decode batch. #running-req: 229, #token: 1320576, token usage: 1.00, cuda graph: True, "
            "gen throughput (token/s): 2498.69, #queue-req: 27,"
        ),
        "median #running-req 229, #queue-req 27 (0 in 0%), token usage 1.00",
    ),
}
READY = {  # verbatim
    "G2": (
        (
            "[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, "
            "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, "
            "available_gpu_mem=13.50 GB"
        ),
        "memory-left",
    ),
    "G4": (
        (
            "[2025-11-11 13:01:09 TP0] max_total_num_tokens=1522816, chunked_prefill_size=1024, "
            "max_prefill_tokens=2048, max_running_requests=4096, context_len=32768, available_gpu_mem=4.64 GB"
        ),
        "memory-tight",
    ),
}
RETRACTIONS = {  # verbatim
    "G2": "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
    "G3": "decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000",
}


@pytest.fixture(autouse=True)
def no_sglang_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed SGLang, whose --help takes seconds."""
    monkeypatch.setattr("batchrunner.advise.advise.installed", lambda _: Flags())


def judged(text: str, directory: Path, **options: Any) -> Judgement:
    path = directory / "server.log"
    path.write_text(text)
    return advise(str(path), **options)


def changes(judgement: Judgement) -> dict[str, str]:
    """Return what is to be changed, by the rule that says so."""
    return {advice.rule: advice.change for advice in judgement.advice if advice.change}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_line_is_a_reading(guide: str, tmp_path: Path) -> None:
    """One line of a guide is read whole, and is no ground for advice."""
    line, reading = GUIDES[guide]
    found = judged(line, tmp_path)
    assert reading in found.lines()[0]
    assert "A reading, not advice" in found.lines()[0]
    assert changes(found) == {}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_line_again_and_again_is_a_sign(guide: str, tmp_path: Path) -> None:
    """Frequent, the guides' own examples mean what the guides say: too conservative, or fine."""
    found = judged(f"{GUIDES[guide][0]}\n" * 40, tmp_path)
    assert set(changes(found)) == ({"conservative"} if guide != "G4" else set())


@pytest.mark.parametrize("guide", READY)
def test_a_guides_ready_line_is_judged_by_its_memory(guide: str, tmp_path: Path) -> None:
    """13.50 GB is too much and 4.64 GB too little; without the card's memory the step is the guides'."""
    line, rule = READY[guide]
    found = changes(judged(line, tmp_path))
    assert set(found) == {rule}
    assert "in steps of 0.01" in found[rule]


@pytest.mark.parametrize("guide", RETRACTIONS)
def test_a_guides_retraction_is_counted(guide: str, tmp_path: Path) -> None:
    """Occasional ones are said to be fine, frequent ones are advised on."""
    line = GUIDES["G4"][0]
    rare = judged(f"{line}\n" * 40 + RETRACTIONS[guide], tmp_path)
    assert changes(rare) == {}
    assert any("up to about one a minute is fine" in line for line in rare.lines())
    often = judged(f"{line}\n{line}\n{RETRACTIONS[guide]}\n" * 20, tmp_path)
    assert changes(often) == {"retractions": "--schedule-conservativeness 1.3"}


def test_what_retractions_cost_decides() -> None:
    """Newer releases say how many tokens the retracted requests had in the pool: often is not much."""
    log = LOGS / "real_retractions.log"
    gained = sum(map(int, re.findall(r"#new_tokens_gained: (\d+)", log.read_text())))
    cost = f"{gained:,} tokens are computed again, 16% of those generated"
    for most, change in ((0.25, ""), (0.15, "--schedule-conservativeness 1.3")):
        judgement = advise(str(log), Thresholds(recomputed=most))
        found = next(advice for advice in judgement.advice if advice.rule == "retractions")
        assert "9.1 a minute" in found.sign
        assert cost in found.sign
        assert found.change == change
    assert Thresholds().recomputed == 0.25


def test_few_samples_are_no_verdict_on_retractions(tmp_path: Path) -> None:
    """Ten a line are not fine because there are few lines: the reading counts them, and that is all."""
    log = LogWriter(step_s=30)
    for _ in range(7):
        log.decode(1, u=0.99)
        for _ in range(10):
            log.retract()
    found = judged(log.text(), tmp_path)
    assert "70 retractions" in found.lines()[0]
    assert [advice.rule for advice in found.advice] == []


REAL: dict[str, set[str]] = {
    "real_conservative.log": {"conservative"},
    "real_queue_empty.log": {"queue-empty"},
    "real_retractions.log": set(),
    "real_after_advice.log": {"conservative"},  # 0.3 now, and max_new_tokens is still far above the outputs
    "real_waves.log": set(),  # outputs of one length: usage goes from 0.4 to 0.99 again and again
}
"""Thinned out logs of SGLang 0.5.23 on a CPU, each provoked by one wrong setting (benchmarks/advice.py)."""


@pytest.mark.parametrize("name", [path.name for path in LOGS.glob("*.log")])
def test_real_logs(name: str) -> None:
    """What was provoked on the real engine is found in what it wrote, and nothing else."""
    assert set(changes(advise(str(LOGS / name)))) == REAL[name]


SIGNS: dict[str, tuple[Callable[[LogWriter], object], set[str]]] = {
    "healthy": (lambda log: log.decode(40), set()),
    "healthy with its drain": (lambda log: log.decode(40).decode(18, q=0, r=90, u=0.4), set()),
    "healthy, rarely retracting": (lambda log: log.decode(20).retract().decode(40), set()),
    "empty queue": (lambda log: log.decode(40, q=0, u=0.5), {"queue-empty"}),
    "empty at times": (
        lambda log: [log.decode(2, q=0).decode(3, q=300) for _ in range(8)],
        {"queue-empty"},
    ),
    "deep queue": (lambda log: log.decode(40, q=2600), {"queue-deep"}),
    "too conservative": (lambda log: log.decode(40, u=0.62), {"conservative"}),
    "retracting": (lambda log: [log.decode(4, u=0.99).retract() for _ in range(9)], {"retractions"}),
}  # fmt: skip


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_shows_the_signs(generation: str, sign: str, tmp_path: Path) -> None:
    """The same load gives the same advice, however the release writes it; a healthy one gives none."""
    load, expected = SIGNS[sign]
    log = LogWriter(generation)
    load(log)
    found = judged(log.text(), tmp_path)
    assert set(changes(found)) == expected
    assert found.healthy == (not expected)


def cuda_oom(frame: str) -> str:
    return (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "/sglang/srt/model_executor/model_runner.py", line 1790, in {frame}\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. "
        "GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
    )


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
        {"long-prompts": "--chunked-prefill-size 2048"},
    ),
    "short prompts that fill small chunks": (
        LogWriter().started(chunk=512).decode(30).mixed_prefill(30, n=1, new=512), {},
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


DEATHS = {
    "Killed": "killed",
    "run.sh: line 89:    33 Killed                  python -m sglang.launch_server": "killed",
    "Loading safetensors checkpoint shards:  75% |███  | 3/4 [00:08<00:02]Killed": "killed",
    "Nov 22 10:00:00 node7 kernel: Out of memory: Killed process 33 (sglang::schedul)": "killed",
    "Child process unexpectedly failed with an exit code 9. pid=33": "killed",
    "Child process unexpectedly failed with exitcode=9. pid=33": "killed",
    "Child process unexpectedly failed with exitcode=131. pid=33": "crashed",
    "Received sigquit from a child process. It usually means the child failed.": "crashed",
    "Fatal Python error: Segmentation fault": "crashed",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "crashed",
    "Rank 0 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), …": "crashed",
}


@pytest.mark.parametrize("line", DEATHS)
def test_what_died_is_not_healthy(line: str, tmp_path: Path) -> None:
    """However well it ran before, and whatever it died of; until a start with other flags."""
    before = LogWriter().started().decode(40)
    found = judged(f"{before.text()}{line}\n", tmp_path)
    assert set(changes(found)) == {DEATHS[line]}
    assert not found.healthy
    after = LogWriter().started(schedule_conservativeness=0.5).decode(40)
    assert judged(f"{before.text()}{line}\n{after.text()}", tmp_path).healthy


@pytest.mark.parametrize("line", DEATHS)
def test_a_death_counts_until_the_server_works_again(line: str, tmp_path: Path) -> None:
    """Started again as it was and at work, it is judged by its load; memory that ran out may do so again."""
    before = LogWriter().started(most=64).decode(40, r=64, u=0.3)
    after = LogWriter().started(most=64)
    started = judged(f"{before.text()}{line}\n{after.text()}", tmp_path)
    assert DEATHS[line] in changes(started)
    works = f"{before.text()}{line}\n{after.decode(40, r=64, u=0.3).text()}"
    assert set(changes(judged(works, tmp_path))) == {"running-capped"}
    again = judged(f"{works}Scheduler hit an exception: Traceback\nAssertionError: page\n", tmp_path)
    assert "crashed" in changes(again)
    oom = judged(works.replace(line, "RuntimeError: Prefill out of memory. Try to lower it."), tmp_path)
    assert set(changes(oom)) == {"oom-prefill"}


def test_a_crash_is_told_by_its_exception(tmp_path: Path) -> None:
    """The first one: what other ranks raise after it only follows, and what came before was survived."""
    log = LogWriter().started().decode(9).say("ValueError: a request was refused")
    log.say(
        "Scheduler hit an exception: Traceback (most recent call last):\nAssertionError: page\nOSError: x"
    )
    (advice,) = (advice for advice in judged(log.text(), tmp_path).advice if advice.change)
    assert advice.sign == "the server died: AssertionError: page"


@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(text='Why CUDA out of memory? Try to lower your batch size. Killed')",
        "Finish: obj=GenerateReqInput(rid='1'), out={'text': 'Decode batch, #running-req: 9, #queue-req: 0'}",
        '{"event": "request.received", "obj": {"text": "Received sigquit; server_args={1: 2}"}}',
        "Not enough memory left on disk /dev/shm for the cache",
        "the last batch was near CUDA out of memory",
        "WARNING: caught RuntimeError: CUDA out of memory, and went on",
        "nvidia-smi failed (exit code 9: no driver.). Falling back to torch.cuda.mem_get_info().",
    ],
)
def test_words_alone_are_no_sign(line: str, tmp_path: Path) -> None:
    """What a prompt says, or a line that only mentions memory, is not taken for SGLang's."""
    log = LogWriter().started().decode(40)
    for _ in range(40):
        log.say(line)
    found = judged(log.text(), tmp_path)
    assert found.healthy
    assert found.situation.load.counted == 40


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


def test_a_flag_that_the_version_lacks_is_not_named(tmp_path: Path) -> None:
    """A server tells its flags by its arguments: advice uses those names, or says nothing."""
    load = LogWriter().decode(30, r=400, g=False).text()
    new = "server_args={'cuda_graph_max_bs_decode': 256, 'enable_metrics': True}\n"
    none = "server_args={'enable_metrics': True}\n"
    assert changes(judged(new + load, tmp_path)) == {"cuda-graph": "--cuda-graph-max-bs-decode 512"}
    assert changes(judged(none + load, tmp_path)) == {}


def test_a_log_without_arguments_asks_the_installed_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not tell its flags is given the installed server's, or the warning that they are guessed."""
    load = LogWriter().decode(30, r=400, g=False).text()
    assert judged(load, tmp_path).lines()[-1] == f"({CHECK_HELP})"
    old = parse_help("  --cuda-graph-max-bs N", "0.5.2")
    monkeypatch.setattr("batchrunner.advise.advise.installed", lambda _: old)
    assert changes(judged(load, tmp_path)) == {"cuda-graph": "--cuda-graph-max-bs 512"}
    assert CHECK_HELP not in judged(load, tmp_path).lines()[-1]


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


def test_an_advice_is_whole(tmp_path: Path) -> None:
    """Each piece has its figures, share and span, the exact change, gain, cost and certainty."""
    (advice,) = judged(LogWriter().started().decode(40, u=0.62).text(), tmp_path).advice[:1]
    assert "below 0.9 (median 0.62)" in advice.sign
    assert "in 100% of 40 samples over 78 s" in advice.sign
    assert advice.args == {"schedule-conservativeness": 0.3}
    assert advice.change == "--schedule-conservativeness 0.3, or a max_new_tokens nearer to real outputs"
    assert advice.effect
    assert advice.tradeoff
    assert advice.certainty == "medium"
    assert advice.evidence["conservative_share"] == 1.0


def test_share_and_span_can_be_set(tmp_path: Path) -> None:
    """What is frequent is the user's to say, by names that are checked."""
    log = LogWriter()
    for _ in range(8):
        log.decode(1, q=0).decode(9, q=300)
    path = str(log.write(tmp_path))
    assert changes(advise(path)) == {}
    assert set(changes(advise(path, Thresholds().with_values(["frequent=0.05"])))) == {"queue-empty"}
    assert changes(advise(path, Thresholds().with_values(["frequent=0.05", "span_s=600"]))) == {}
    wrong = batchrun("advise", path, "--threshold", "frequency=1")
    assert wrong.exit_code == 2
    assert "no such threshold; there are at_cap, cached_well" in wrong.stderr
    for setting, words in [
        ("span_s=x", "'x' is not a number"),
        ("queue_low=inf", "give a number from 0 on"),
        ("queue_deep=nan", "give a number from 0 on"),
        ("frequent=-1", "give a number from 0 on"),
        ("queue_low=5000", "queue_low 5000, queue_deep 2000: none may be above the next"),
        ("memory_good_gb=12", "memory_high_gb 10: none may be above the next"),
    ]:
        refused = batchrun("advise", path, "--threshold", setting)
        assert refused.exit_code == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_restart_with_other_flags_is_a_new_story(tmp_path: Path) -> None:
    """What was wrong before the flags changed is not held against the new ones."""
    before = LogWriter().started().decode(40, u=0.5)
    after = LogWriter().started(schedule_conservativeness=0.3).decode(40)
    assert changes(judged(before.text() + after.text(), tmp_path)) == {}
    assert set(changes(judged(before.text() * 2, tmp_path))) == {"conservative"}


def test_a_restart_with_other_flags_has_its_own_memory(tmp_path: Path) -> None:
    """Weights over more cards, or of another checkpoint, are not those of the life before."""
    before = LogWriter().started(weights_gb=61).text()
    after = LogWriter().started(tp_size=2, weights_gb=31).text()
    after = after.replace("type=LlamaForCausalLM", "type=QwenForCausalLM, quant=fp8")
    facts = judged(before + after, tmp_path).situation.facts
    assert (facts.weights_gb, facts.model, facts.quantised) == (31, "QwenForCausalLM", "fp8")
    facts = judged(before + after.partition("\n")[0], tmp_path).situation.facts
    assert (facts.weights_gb, facts.card_gb, facts.ready) == (None, None, None)


def test_each_replica_has_its_own_story(tmp_path: Path) -> None:
    """One that comes back with other flags, or as it was, takes nothing away from what others told."""
    oom = "Prefill out of memory. Try to lower your batch size."
    healed = LogWriter().started().decode(20).say(oom).started(chunk=4096)
    logs = [
        LogWriter().started().decode(40).say("Scheduler hit an exception: AssertionError: page"),
        LogWriter().started().decode(30).say(oom),
        healed.decode(10).say("Received sigquit").started(chunk=4096).decode(10),
    ]
    reader = LogReader(Thresholds())
    for number, log in enumerate(logs):
        reader.source = f"engine-{number}"
        reader.read(log.write(tmp_path))
    assert [track.counted for track in reader.series.tracks.values()] == [40, 30, 20]
    assert [trouble.what.text for trouble in reader.facts.troubles] == [logs[1].lines[-1]]
    assert reader.facts.died
    assert "AssertionError: page" in reader.facts.died.text


@pytest.mark.parametrize(
    "label",
    [
        "{}: ",
        "server-{}  | ",
        "[pod/server-{}/sglang] ",
        "2026-03-01T12:00:00.1Z ",
        "Mar  1 12:00:00 node{} sglang[123]: ",
        "2026-03-01T12:00:00+0100 node{} python3[9]: ",
    ],
)
def test_what_others_put_before_a_line(label: str, tmp_path: Path) -> None:
    """Slurm, Docker, Kubernetes and systemd name server or time before each line: it is read all the same."""
    logs = [LogWriter().decode(20, u=0.6).lines for _ in range(2)]
    lines = [
        label.format(number) + line for pair in zip(*logs, strict=True) for number, line in enumerate(pair)
    ]
    found = judged("\n".join(lines), tmp_path)
    schedulers = " of 2 schedulers" if "{}" in label else ""
    assert found.lines()[0].endswith(f"40 samples{schedulers} over 38 s")
    assert set(changes(found)) == {"conservative"}


def test_ranks_are_told_apart(tmp_path: Path) -> None:
    """Four servers in one log are four schedulers; four ranks of one say the same thing once."""
    logs = [LogWriter().decode(30, q=0), *(LogWriter().decode(30, q=300) for _ in range(3))]
    path = tmp_path / "slurm.log"
    path.write_text("\n".join(interleaved(*logs)))
    found = advise(str(path))
    assert "120 samples of 4 schedulers over 58 s" in found.lines()[0]
    assert set(changes(found)) == {"queue-empty"}
    ranks = "".join(
        f"[2026-03-01 12:00:0{i} TP{rank}] {GUIDES['G4'][0]}\n" for i in range(9) for rank in range(4)
    )
    assert advise(str(_written(tmp_path / "tp.log", ranks.encode()))).situation.load.counted == 9
    retracted = "".join(
        f"[2026-03-01 12:0{i}:00 TP{rank}] {text}\n"
        for i in range(9) for text in (GUIDES["G4"][0], RETRACTIONS["G2"]) for rank in range(4)
    )  # fmt: skip
    assert advise(str(_written(tmp_path / "tp.log", retracted.encode()))).situation.retractions == 9


def test_ranks_are_told_apart_in_a_journal(tmp_path: Path) -> None:
    """What journalctl puts before a line hides neither its time nor its rank."""
    logs = [LogWriter("0.5.9").decode(30, q=0).lines, LogWriter("0.5.9").decode(30, q=300).lines]
    logs[1] = [line.replace("DP0", "DP1") for line in logs[1]]
    lines = (
        f"Nov 22 10:00:00 host python[{7 + n}]: {log[i]}" for i in range(60) for n, log in enumerate(logs)
    )
    found = judged("\n".join(lines), tmp_path)
    assert "60 samples of 2 schedulers over 58 s" in found.lines()[0]
    assert set(changes(found)) == {"queue-empty"}


def test_the_fuller_pool_of_a_hybrid_model_counts(tmp_path: Path) -> None:
    """Where the state of Mamba layers is full, it is that which limits, and not a conservative scheduler."""
    log = LogWriter("hybrid").decode(40, u=0.12)
    assert set(changes(judged(log.text(), tmp_path))) == {"conservative"}
    assert judged(log.text().replace("mamba usage: 0.20", "mamba usage: 0.99"), tmp_path).healthy


def test_a_restart_may_name_its_ranks_otherwise(tmp_path: Path) -> None:
    """A server with one GPU, started where one with two was, is heard, though its lines name no rank."""
    before = LogWriter("0.5.2").started(tp_size=2).decode(30)
    after = LogWriter().started(tp_size=1).decode(30, q=0)
    found = judged(before.text() + after.text(), tmp_path)
    assert found.situation.load.counted == 30
    assert set(changes(found)) == {"queue-empty"}


def test_an_older_log_after_a_newer_one(tmp_path: Path) -> None:
    """Time that runs backwards is no time: two logs in one file are as long as both; midnight is none."""
    newer, older = LogWriter(), LogWriter()
    newer.now += timedelta(days=2)
    both = judged(newer.decode(30).text() + older.decode(30).text(), tmp_path)
    assert "60 samples over 116 s" in both.lines()[0]
    assert both.healthy
    midnight = judged(LogWriter("0.2").decode(30).text(), tmp_path)
    assert "30 samples over 58 s" in midnight.lines()[0]


def test_prefill_alone_is_work(tmp_path: Path) -> None:
    """Scoring and embedding have no decode lines: queue and usage are those of prefill lines then."""
    log = LogWriter()
    for _ in range(40):
        log.prefill(1).now += timedelta(seconds=2)
    found = judged(log.text(), tmp_path)
    assert "40 samples over 78 s" in found.lines()[0]
    assert changes(found) == {}
    deep = judged(log.text().replace("#queue-req: 300", "#queue-req: 5000"), tmp_path)
    assert set(changes(deep)) == {"queue-deep"}
    mixed = judged(log.decode(40).text(), tmp_path)
    assert mixed.situation.load.counted == 40
    assert mixed.situation.load.share("conservative") == 0


JUNK = (
    "9" * 5000, ".", "1.2.3", "{", "}", "[" * 5000, "{[]: 1}", "{1, 2}", "{1: 2}", "1e999", "'", "=", "¹",
    "{'tp_size': 1e999}", "{'cuda_graph_config': {'decode': {'max_bs': [1]}}}", "{'cuda_graph_max_bs': 'x'}",
)  # fmt: skip


@given(
    st.sampled_from([*LogWriter("hybrid").started().decode(1).prefill(1).retract().lines, cuda_oom("forward"),
                     "[x] server_args=", "Load weight begin. avail mem=78.50 GB", *DEATHS]),
    st.integers(0, 400),
    st.integers(0, 900),
    st.sampled_from(JUNK) | st.text(),
)  # fmt: skip
@example("server_args=", 12, 0, "{[]: 1}")
@example("server_args=", 12, 0, "{1, 2}")
@example("server_args=", 12, 0, "{'cuda_graph_max_bs': 'x'}")
@example("[2026-03-01 23:59:30] Decode batch, #running-req: 9, token usage: 0.95, #queue-req: 5", 72, 0, ".")
@example("[2026-03-01 23:59:30] Decode batch, #running-req: 9, #queue-req: 5", 51, 0, "9" * 5000)
@example("max_total_num_tokens=1, available_gpu_mem=7.00 GB", 46, 0, ".")
def test_no_line_is_too_damaged(line: str, at: int, length: int, junk: str) -> None:
    """Whatever stands in a log, its reader goes on, and the rules have numbers to go by."""
    reader = LogReader(Thresholds())
    at = min(at, len(line))
    damaged = line[:at] + junk + line[at + length :]
    for part in (*damaged.split("\n"), *LogWriter().started().decode(9).lines):
        reader.take(part)
    assert reader.series.counted >= 9
    apply_all(Situation(reader.series, reader.series, reader.facts), Flags())


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "gb18030", "latin-1"]
)
def test_the_encoding_does_not_matter(encoding: str, tmp_path: Path) -> None:
    """A log from another locale, or through PowerShell, is read like any other."""
    words = "café à la crème" if encoding == "latin-1" else "模型加载完成"
    text = f"{words}\r\n" + LogWriter().decode(40, u=0.6).text().replace("\n", f" {words}\r\n")
    found = advise(str(_written(tmp_path / "server.log", text.encode(encoding))))
    assert set(changes(found)) == {"conservative"}
    assert found.situation.load.counted == 40


def test_a_log_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """Its first and its last line may be halves; colours and progress bars may stand in it."""
    text = LogWriter().started().decode(40, u=0.6).text()
    text = text.replace("[2026", "\x1b[32m[2026").replace(
        "Load weight begin", "  0%|  |\r 9%|# |\r[x] Load weight begin"
    )
    cut = advise(str(_written(tmp_path / "server.log", text.encode()[57:-61])))
    assert set(changes(cut)) == {"conservative"}


@pytest.mark.parametrize(
    "content",
    [b"", b"hello\n" * 99, b"\0" * 5000, b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 99,
     b"INFO engine.py:310] Avg generation throughput: 40 tokens/s, Running: 3 reqs, GPU KV cache usage: 1%\n",
     b"torch.OutOfMemoryError: CUDA out of memory.\n", b"x" * 3_000_000],
)  # fmt: skip
def test_what_is_not_a_log_of_sglang_is_refused(content: bytes, tmp_path: Path) -> None:
    """Another program's log, a picture, an empty file: one line and exit 2, no advice from noise."""
    result = batchrun("advise", _written(tmp_path / "a.log", content))
    assert result.exit_code == 2
    assert "not a log of SGLang" in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A path that is not there, a directory that is no run, a file that may not be read."""
    for source, words in [(tmp_path / "no", "no such file"), (tmp_path, "no run.json")]:
        result = batchrun("advise", source)
        assert result.exit_code == 2
        assert words in result.stderr


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A log is streamed: a hundred times as long, it takes no more memory, and the shares are exact."""
    path = tmp_path / "large.log"
    block = LogWriter().decode(7, q=0).decode(993, q=300).text()
    path.write_text(block * 20)
    tracemalloc.start()
    try:
        found = advise(str(path))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found.situation.load.counted == 20_000
    assert found.situation.load.share("empty") == 0.007


def test_a_card_that_is_not_known_is_said(tmp_path: Path) -> None:
    """A slip in --card would leave its advice away: one line says which names there are."""
    path = LogWriter().started(attention_backend="triton").decode(40).write(tmp_path)
    for name in ("RTX4090", "bogus"):
        wrong = batchrun("advise", path, "--card", name)
        assert wrong.exit_code == 2
        assert f"--card {name}: not known here; known are H100, H200" in wrong.stderr
    assert "attention-backend" in changes(advise(str(path), card="NVIDIA RTX 6000 Ada Generation"))


def test_json_is_for_machines(tmp_path: Path) -> None:
    """The same as data: what was read, whether it is healthy, each piece of advice with its flags."""
    path = LogWriter().started().decode(40, u=0.62).write(tmp_path)
    found = json.loads(batchrun("advise", path, "--json").stdout)
    assert found["healthy"] is False
    assert found["flags_known"] is True
    assert found["reading"]["median_queue"] == 317
    assert found["advice"][0]["rule"] == "conservative"
    assert found["advice"][0]["args"] == {"schedule-conservativeness": 0.3}
    assert found["thresholds"]["usage_good"] == 0.9


def test_healthy_is_an_answer(tmp_path: Path) -> None:
    """Where nothing is to be changed, that is said, with the figures."""
    lines = batchrun("advise", LogWriter().started().decode(40).write(tmp_path)).stdout.splitlines()
    assert lines[1:] == [
        (
            "healthy: median #running-req 233, #queue-req 317 (0 in 0%), token usage 0.95, 0 retractions, "
            "4,594 tokens/s"
        ),
        "healthy: available_gpu_mem is 7.20 GB when the server is ready: 5-10 GB is good",
    ]


def test_the_readme_has_all_rules() -> None:
    """The table of the docs is the table of the code, and each rule has its test here."""
    text = README.read_text()
    for row in table():
        assert row in text, "\n".join(table())
    tests = Path(__file__).read_text()
    assert [rule.name for rule in RULES if f'"{rule.name}"' not in tests] == []
