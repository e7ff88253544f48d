"""What an engine died of is told by its log, its exit status and the kernel; what follows, by the guides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchrunner.engines.logs.reader import LogReader
from batchrunner.engines.logs.series import Thresholds
from batchrunner.engines.recovery.diagnosis import Death, EndedServer, Kind, examine

if TYPE_CHECKING:
    from batchrunner.engines.logs.lines import Phase

READY = (
    "[2025-08-11 17:17:03 TP0] max_total_num_tokens=665690, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB"
)
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.19 MiB is free."
)
CUDA_ERROR = "RuntimeError: CUDA error: out of memory"
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
    reader = LogReader(Thresholds())
    for line in life.lines:
        reader.take(line)
    return examine(life, reader.facts)


@pytest.mark.parametrize(
    ("kind", "log"),
    [
        ("prefill", f"{READY}\nRuntimeError: Prefill out of memory. Try to lower your batch size."),
        ("decode", f"{READY}\n[2025-08-11 17:20:00] Decode out of memory. Try to lower your batch size."),
        ("general", f"{READY}\nRuntimeError: Out of memory. Try to lower your batch size."),
        ("general", f"{READY}\nRuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create()`"),
        ("requests", f"{READY}\nRuntimeError: Not enough space for mamba cache, try to increase it"),
        (
            "requests",
            (f"{READY}\nRuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
            "`--max-running-requests`. req_to_token_pool.available_size()=0, num_reqs=3,"),
        ),
        (
            "graph",
            (f"[2025-08-11 17:11:00] Capture cuda graph begin. This can take up to several minutes.\n{CUDA}\n"
            "During handling of the above exception, another exception occurred:\n"
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 672.00 MiB."),
        ),
        ("graph", f"Load weight end. avail mem=20 GB\nCapture decode CUDA graph begin. bs=[1]\n{CUDA}"),
        (
            "prefill-graph",  # 0.5.23: what it captures is a forward pass of prefill
            ("Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4]\n"
            "[2026-11-22 10:00:00] OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            f"{traceback('layers/attention/flashinfer_backend.py forward_extend')}\n{CUDA}"),
        ),
        (
            "prefill-graph",
            ("Capture piecewise CUDA graph begin. avail mem=2.30 GB\n"
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 672.00 MiB."),
        ),
        ("load", f"[2025-08-11 17:10:10 TP0] Load weight begin. avail mem=78.50 GB\n{CUDA}"),
        ("general", f"Load weight begin. avail mem=78 GB\nLoad weight end. avail mem=63 GB\n{OLD_CUDA}"),
        (
            "pool",
            ("Load weight end. avail mem=1 GB\n"
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        ),
        (
            "pool",
            ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7"
            ". Raise --mem-fraction-static above 0.873 (minimum viable = 1 - available/pre = 0.8721)."),
        ),
        (
            "prefill",
            f"{READY}\n{traceback('model_executor/model_runner.py forward_extend')}\n{CUDA}",
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
        ("general", f"{READY}\n{traceback('layers/sampler.py forward')}\n{CUDA_ERROR}"),
        ("decode", f'{READY}\n[rank0]:   File "m.py", line 1, in forward_decode\n[rank0]: {CUDA}'),
        ("general", f"{READY}\nterminate called\n  what():  CUDA error: out of memory"),
        (
            "prefill",  # one rank is out of memory, the others only notice
            (f"{READY}\n{traceback('model_executor/model_runner.py forward_extend')}\n{CUDA}\n"
            f"{traceback('model_executor/model_runner.py forward_extend')}\n"
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3."),
        ),
        ("crash", "OSError: [Errno 98] error while attempting to bind on address: address already in use"),
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
