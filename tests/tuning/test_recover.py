"""What an engine died of, or that it hangs, and the safer arguments of its next start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.engines.hang_detector import WARM_UP, HangDetector, SilenceTimer
from batchrunner.sglang.flags import Flags, of_arguments
from batchrunner.sglang.logs.lines import Phase, ServerReady
from batchrunner.sglang.logs.reader import Facts, LogReader
from batchrunner.tuning.memory import Memory
from batchrunner.tuning.recover import (
    MOST_CHANGES,
    Death,
    EndedServer,
    Healer,
    Kind,
    examine,
    safer,
)

READY = (
    "[2025-08-11 17:17:03 TP0] max_total_num_tokens=665690, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB"
)
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.19 MiB is free."
)
OLD_CUDA = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has 14.76 GiB"


def traceback(*frames: str) -> str:
    """Return the traceback of a scheduler; a frame is `file function`."""
    lines = ["[2025-08-11 17:20:00 TP0] Scheduler hit an exception: Traceback (most recent call last):"]
    for frame in ("managers/scheduler.py run_scheduler_process", *frames):
        file, function = frame.split()
        lines += [f'  File "/site-packages/sglang/srt/{file}", line 1983, in {function}', "    ret = f("]
    return "\n".join(lines)


def died_of(life: EndedServer) -> Death:
    """Read a log as the healer does, and tell."""
    reader = LogReader()
    for line in life.lines:
        reader.take(line)
    return examine(life, reader.facts)


@pytest.mark.parametrize(
    ("kind", "log"),
    [
        ("prefill", f"{READY}\nRuntimeError: Prefill out of memory. Try to lower your batch size."),
        ("general", f"{READY}\nRuntimeError: Out of memory. Try to lower your batch size."),
        (
            "decode",
            (f"{READY}\nRuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
            "`--max-running-requests`. req_to_token_pool.available_size()=0, num_reqs=3,"),
        ),
        (
            "graph",
            (f"[2025-08-11 17:11:00] Capture cuda graph begin. This can take up to several minutes.\n{CUDA}\n"
            "During handling of the above exception, another exception occurred:\n"
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 672.00 MiB."),
        ),
        (
            "graph",  # 0.5.23: what it captures is a forward pass of prefill
            ("Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4]\n"
            "[2026-11-22 10:00:00] OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            f"{traceback('layers/attention/flashinfer_backend.py forward_extend')}\n{CUDA}"),
        ),
        (
            "states",  # 0.5.23, memory_pool.py and kv_cache_configurator.py
            (f"{READY}\nAssertionError: Not enough space for mamba cache, try to increase "
            "--mamba-full-memory-ratio or --max-mamba-cache-size. mid=None, self.mamba_pool.size=48,"),
        ),
        (
            "states",
            ("RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
            "max_mamba_cache_size=4, mamba_ratio=5, resulting max_num_reqs=0."),
        ),
        ("load", f"[2025-08-11 17:10:10 TP0] Load weight begin. avail mem=78.50 GB\n{CUDA}"),
        ("general", f"Load weight begin. avail mem=78 GB\nLoad weight end. avail mem=63 GB\n{OLD_CUDA}"),
        (
            "pool",
            ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7"
            ". Raise --mem-fraction-static above 0.873 (minimum viable = 1 - available/pre = 0.8721)."),
        ),
        (
            "prefill",  # 0.5.23
            f"{READY}\n{traceback('model_executor/runner/eager_runner.py _execute_extend')}\n{CUDA}",
        ),
        (
            "decode",
            (f"{READY}\n{traceback('model_executor/model_runner.py forward_decode', 'models/q.py forward')}"
            f"\n{OLD_CUDA}"),
        ),
        ("decode", f'{READY}\n[rank0]:   File "m.py", line 1, in forward_decode\n[rank0]: {CUDA}'),
        (
            "prefill",  # one rank is out of memory, the others only notice
            (f"{READY}\n{traceback('model_executor/model_runner.py forward_extend')}\n{CUDA}\n"
            f"{traceback('model_executor/model_runner.py forward_extend')}\n"
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3."),
        ),
        ("crash", f"{READY}\nRuntimeError: CUDA error: an illegal memory access was encountered"),
        (
            "crash",  # retractions say it too, and nothing dies of them
            (f"{READY}\n[2025-03-07 21:49:33 TP13] Decode out of memory happened. #retracted_reqs: 1, "
            "#new_token_ratio: 0.1474 -> 0.1845\n[t] decode out of memory happened, #retracted_reqs: 1, "
            "#new_token_ratio: 0.9998 -> 1.0000\nAssertionError: page"),
        ),
        (
            "crash",
            ("Exception: Capture cuda graph failed: CUDA error: an illegal memory access was encountered\n"
             "[t] Not enough memory left on disk\n[t] Receive: obj=(text='Error: CUDA out of memory')"),
        ),
    ],
)  # fmt: skip
def test_a_log_tells_what_an_engine_died_of(kind: Phase | Kind, log: str) -> None:
    """Each generation's words, the stage of a start, and the innermost frame that names a forward pass."""
    assert died_of(EndedServer(log.splitlines(), exit_code=1)).kind == kind


BATCH = "[2025-08-11 19:{:02} {}TP0] Decode batch, #running-req: 3, token usage: 0.5, #queue-req: 4"


def test_memory_that_ran_out_long_ago_killed_nobody() -> None:
    """A request may run out of memory, and the server lives on; other ranks go on while one dies of it."""
    batches = [BATCH.format(minute, "") for minute in range(9)]
    frames = traceback("managers/scheduler.py event_loop")
    survived = ["ERROR: Exception in ASGI application", CUDA, *batches]
    crash = [frames, "RuntimeError: CUDA error: an illegal memory access was encountered"]
    assert died_of(EndedServer([*survived, *crash], exit_code=1)).kind == "crash"
    died = "\n".join([*survived, *crash[:1], CUDA, BATCH.format(30, "DP1 ")])
    assert died_of(EndedServer(died.splitlines(), exit_code=1)).kind == "decode"


@pytest.mark.parametrize(
    ("kind", "code", "kills", "log"),
    [
        ("killed", 137, 1, READY),
        ("killed", 1, 2, "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering"),
        ("crash", 137, 0, READY),  # somebody's kill -9
        ("crash", 1, 1, "AssertionError: the kernel killed something else"),
        ("decode", 137, 0, f"{READY}\nRuntimeError: Decode out of memory. Try to lower your batch size."),
    ],
)  # fmt: skip
def test_the_kernel_is_asked_who_killed(kind: Phase | Kind, code: int, kills: int, log: str) -> None:
    """A SIGKILL is the kernel's only where it says so: a plain `kill -9` changes no argument."""
    assert died_of(EndedServer(log.splitlines(), exit_code=code, oom_kills=kills)).kind == kind


GPU = {
    "chunked_prefill_size": 8192, "max_running_requests": 4096, "mem_fraction_static": 0.83,
    "cuda_graph_max_bs": 256, "context_length": 4096,
}  # fmt: skip
CPU = {
    "device": "cpu", "chunked_prefill_size": 4096, "max_running_requests": 32, "max_total_tokens": 20_000,
    "context_length": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "now", "steps"),
    [
        ("prefill", GPU, [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048},
                          {"mem-fraction-static": 0.8}, {"mem-fraction-static": 0.7},
                          {"mem-fraction-static": 0.6}, {}]),
        ("prefill", {"chunked_prefill_size": -1}, [{"chunked-prefill-size": 4096}]),  # switched off
        ("graph", GPU, [{"cuda-graph-max-bs-decode": 128, "mem-fraction-static": 0.8},
                        {"cuda-graph-max-bs-decode": 64, "mem-fraction-static": 0.7},
                        {"cuda-graph-max-bs-decode": 32, "mem-fraction-static": 0.6},
                        {"cuda-graph-max-bs-decode": 16},
                        {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"},
                        {}]),
        ("graph", GPU | {"cuda_graph_max_bs": 8}, [{"mem-fraction-static": 0.8}]),  # never larger graphs
        ("general", GPU | {"mem_fraction_static": 0.7},
         [{"mem-fraction-static": 0.6}, {"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048},
          {"max-running-requests": 225}]),
        ("states", GPU, [{"mamba-full-memory-ratio": 1.8}, {"mamba-full-memory-ratio": 3.6},
                         {"mamba-full-memory-ratio": 7.2}, {"max-running-requests": 225}]),
        ("states", GPU | {"max_mamba_cache_size": 48}, [{"max-mamba-cache-size": 96}]),
        ("pool", GPU, [{"mem-fraction-static": 0.88}, {"mem-fraction-static": 0.93}, {}]),
        ("killed", CPU, [{"max-total-tokens": 10_000}, {"max-total-tokens": 5_000},
                         {"max-running-requests": 24}]),
        ("killed", GPU, [{}]),  # the machine's memory, not the card's
        ("crash", GPU, [{}]),
    ],
)  # fmt: skip
def test_the_guides_order_of_steps(
    kind: Phase | Kind, now: dict[str, Any], steps: list[dict[str, Any]]
) -> None:
    """Each death is followed by the next safer step, until there is none."""
    arguments = dict(now)
    for step in steps:
        facts = Facts(arguments=arguments)
        assert safer(Death(kind, "", running=300), facts, Flags()) == step
        arguments |= {name.replace("-", "_"): value for name, value in step.items()}


def test_what_the_server_chose_counts() -> None:
    """The limits that it says at ready come before what it was asked for, or not asked."""
    ready = ServerReady(20_000, 4096, 200, 4096, None)
    facts = Facts(arguments={"device": "cpu", "max_total_tokens": None}, ready=ready)
    assert safer(Death("prefill", ""), facts, Flags()) == {"chunked-prefill-size": 2048}
    assert safer(Death("decode", ""), facts, Flags()) == {"max-running-requests": 150}
    assert safer(Death("killed", ""), facts, Flags()) == {"max-total-tokens": 10_000}


def test_weights_keep_their_place() -> None:
    """The pool is not made smaller than the weights allow: then graphs are left away, or fewer run."""
    facts = Facts(arguments=GPU | {"cuda_graph_max_bs": 8}, card_gb=15, weights_gb=12)
    old = of_arguments(None, ["cuda_graph_max_bs", "disable_cuda_graph", "mem_fraction_static"])
    off = {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    assert safer(Death("graph", ""), facts, Flags()) == off
    assert safer(Death("graph", ""), facts, old) == {"disable-cuda-graph": True}
    assert safer(Death("general", ""), facts, Flags()) == {"chunked-prefill-size": 4096}


SHORTEST_S = 60.0
URL = "http://127.0.0.1:30000"


def warm_timer(pause_s: float = 1.0) -> tuple[SilenceTimer, float]:
    """Return a timer that has seen work every so often for long enough, and the time."""
    timer, now = SilenceTimer(SHORTEST_S), 0.0
    while now <= WARM_UP * SHORTEST_S + 2 * pause_s:
        now += pause_s
        assert timer.poll(now, now, busy=True) is None
    return timer, now


def silence_of(timer: SilenceTimer, now: float, work: object) -> float:
    """Return after how long a silence is called a hang, looked at every half second."""
    began = now
    while timer.poll(now, work, busy=True) is None:
        now += 0.5
        assert now - began < 10_000, "never"
    return now - began


@given(pauses=st.lists(st.floats(0.1, SHORTEST_S), min_size=1, max_size=50), polls=st.floats(0.1, 10))
def test_work_is_never_a_hang(pauses: list[float], polls: float) -> None:
    """Something done at least every `limits.hang` is no hang, however rare the looks."""
    timer, now = SilenceTimer(SHORTEST_S), 0.0
    for work, pause in enumerate(pauses):
        until = now + pause
        while now < until:
            assert timer.poll(now, work, busy=True) is None
            now += polls


def test_the_reason_why_recovery_gives_up_is_the_true_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes that are used up are not called arguments that are used up."""
    healer = Healer({}, Memory(tmp_path / "memory"), [])
    log = f"{READY}\nRuntimeError: Decode out of memory. Try to lower your batch size."
    running = "[2025-08-11 17:18:00 TP0] Decode batch, #running-req: 4000, #queue-req: 1"
    ended = EndedServer([*f"{running}\n{log}".splitlines()])
    for _ in range(MOST_CHANGES):
        assert healer.heal("replica 0", ended._replace(args=healer.args))
    caplog.clear()
    assert not healer.heal("replica 0", ended._replace(args=healer.args))
    assert f"given up after {MOST_CHANGES} changes of its arguments; max-running-requests" in caplog.text


def test_how_long_a_silence_is_borne() -> None:
    """Five times the floor at first, the floor when the server is known to be quick."""
    assert silence_of(SilenceTimer(SHORTEST_S), 0.0, "x") == pytest.approx(WARM_UP * SHORTEST_S, abs=1)
    timer, now = warm_timer()
    assert silence_of(timer, now, "x") == pytest.approx(SHORTEST_S, abs=1)


def load(running: int, work: float, *, queue: int = 0, at: float = 0.0) -> SchedulerLoad:
    return SchedulerLoad(URL, "loads", running, queue, 0.5, used_tokens=100, taken_at=at, work=work)


def two_ranks(first: SchedulerLoad, second: SchedulerLoad) -> list[SchedulerLoad]:
    return [replace(first, scheduler=f"{URL}#dp0"), replace(second, scheduler=f"{URL}#dp1")]


@pytest.mark.parametrize(
    ("told", "hangs"),
    [
        (lambda step: [load(4, step)], False),
        (lambda step: [load(4, 1, at=step)], True),  # the clock of the telling is no work
        (lambda step: [load(4, 1, queue=step)], True),  # nor is an arrival
        (lambda step: [load(4 + step % 2, 1)], False),  # rows began or ended
        (lambda step: [load(4, 1)] if step == 0 else [], True),  # a poll that fails is no work
        (lambda _: [], False),  # a server that never told its load cannot be judged
        (lambda step: two_ranks(load(4, step), load(4, 1)), True),  # one rank of two stands still
        (lambda step: two_ranks(load(4, step), load(0, 1)), False),  # it has nothing to do
    ],
)
def test_what_counts_as_work(told: Callable[[int], list[SchedulerLoad]], hangs: bool) -> None:
    """A forward pass does, counted or seen in what is running; a reply to a poll does not."""
    detector = HangDetector(1.0)
    assert any(detector.poll(step / 2, told(step), in_flight=8) for step in range(40)) is hangs
