"""What an engine died of is told by its log, its exit status and the kernel; what follows, by the guides."""

from __future__ import annotations

import pytest

from batchrunner.care.death import Death, Kind, Life, examine
from batchrunner.care.effective import Effective, arguments_told, effective
from batchrunner.care.flags import Flags, of_arguments
from batchrunner.care.host import memory_bytes, oom_kills
from batchrunner.care.safer import calmer, safer

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
ARGS = (
    "[2025-08-11 17:10:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.83, "
    "max_running_requests=None, chunked_prefill_size=8192, cuda_graph_max_bs=None, api_key='***')"
)
NEW_ARGS = (
    "[2026-11-22 02:06:49] server_args={'model_path': 'm', 'mem_fraction_static': 0.716, "
    "'max_running_requests': 32, 'max_total_tokens': 20000, 'chunked_prefill_size': 4096, "
    "'schedule_conservativeness': 1.0, 'cuda_graph_config': {'decode': {'backend': 'full', 'max_bs': 256, "
    "'bs': [1, 2, 256]}, 'prefill': {'backend': 'disabled', 'max_bs': 9}}, 'cuda_graph_max_bs_decode': None}"
)


def traceback(*frames: str) -> str:
    """Return the traceback of a scheduler; a frame is `file function`."""
    lines = ["[2025-08-11 17:20:00 TP0] Scheduler hit an exception: Traceback (most recent call last):"]
    for frame in ("managers/scheduler.py run_scheduler_process", *frames):
        file, function = frame.split()
        lines += [f'  File "/site-packages/sglang/srt/{file}", line 1983, in {function}', "    ret = f("]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("kind", "log"),
    [
        ("oom_prefill", f"{READY}\nRuntimeError: Prefill out of memory. Try to lower your batch size."),
        ("oom_decode", f"{READY}\n[2025-08-11 17:20:00] Decode out of memory. Try to lower your batch size."),
        ("oom_general", f"{READY}\nRuntimeError: Out of memory. Try to lower your batch size."),
        (
            "oom_requests",
            (f"{READY}\nRuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
            "`--max-running-requests`. req_to_token_pool.available_size()=0, num_reqs=3,"),
        ),
        (
            "oom_graph",
            (f"[2025-08-11 17:11:00] Capture cuda graph begin. This can take up to several minutes.\n{CUDA}\n"
            "During handling of the above exception, another exception occurred:\n"
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 672.00 MiB."),
        ),
        ("oom_graph", f"Load weight end. avail mem=20 GB\nCapture decode CUDA graph begin. bs=[1]\n{CUDA}"),
        ("oom_load", f"[2025-08-11 17:10:10 TP0] Load weight begin. avail mem=78.50 GB\n{CUDA}"),
        ("oom_general", f"Load weight begin. avail mem=78 GB\nLoad weight end. type=Llama\n{OLD_CUDA}"),
        (
            "no_pool",
            ("Load weight end. avail mem=1 GB\n"
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        ),
        (
            "no_pool",
            ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7"
            ". Raise --mem-fraction-static above 0.873 (minimum viable = 1 - available/pre = 0.8721)."),
        ),
        (
            "oom_prefill",
            f"{READY}\n{traceback('model_executor/model_runner.py forward_extend')}\n{CUDA}",
        ),
        (
            "oom_prefill",  # 0.5.23
            f"{READY}\n{traceback('model_executor/runner/eager_runner.py _execute_extend')}\n{CUDA}",
        ),
        (
            "oom_decode",
            (f"{READY}\n{traceback('model_executor/model_runner.py forward_decode', 'models/q.py forward')}"
            f"\n{OLD_CUDA}"),
        ),
        (
            "oom_decode",  # 0.2
            f"{READY}\n{traceback('managers/tp_worker.py forward_decode_batch')}\n{OLD_CUDA}",
        ),
        ("oom_general", f"{READY}\n{traceback('layers/sampler.py forward')}\n{CUDA_ERROR}"),
        (
            "oom_prefill",  # one rank is out of memory, the others only notice
            (f"{READY}\n{traceback('model_executor/model_runner.py forward_extend')}\n{CUDA}\n"
            f"{traceback('model_executor/model_runner.py forward_extend')}\n"
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3."),
        ),
        ("port", "OSError: [Errno 98] error while attempting to bind on address: address already in use"),
        ("crash", f"{READY}\nRuntimeError: CUDA error: an illegal memory access was encountered"),
        (
            "crash",  # retractions say it too, and nothing dies of them
            (f"{READY}\n[2025-03-07 21:49:33 TP13] Decode out of memory happened. #retracted_reqs: 1, "
            "#new_token_ratio: 0.1474 -> 0.1845\n[t] decode out of memory happened, #retracted_reqs: 1, "
            "#new_token_ratio: 0.9998 -> 1.0000\nAssertionError: page"),
        ),
        ("crash", "Exception: Capture cuda graph failed: invalid argument"),
        ("crash", ""),
    ],
)  # fmt: skip
def test_a_log_tells_what_an_engine_died_of(kind: Kind, log: str) -> None:
    """Each generation's words, the stage of a start, and the innermost frame that names a forward pass."""
    assert examine(Life(log.splitlines(), code=1)).kind == kind


@pytest.mark.parametrize(
    ("kind", "code", "kills", "log"),
    [
        ("killed_by_kernel", 137, 1, READY),
        ("killed_by_kernel", 1, 2, "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering"),
        ("crash", 137, 0, READY),  # somebody's kill -9
        ("crash", 1, 1, "AssertionError: the kernel killed something else"),
        ("oom_decode", 137, 0, f"{READY}\nRuntimeError: Decode out of memory. Try to lower your batch size."),
    ],
)  # fmt: skip
def test_the_kernel_is_asked_who_killed(kind: Kind, code: int, kills: int, log: str) -> None:
    """A SIGKILL is the kernel's only where it says so: a plain `kill -9` changes no argument."""
    assert examine(Life(log.splitlines(), code=code, oom_kills=kills)).kind == kind


def test_the_machine_tells_its_memory() -> None:
    """What the kernel killed and what we may take can be read here, whatever the cgroup's version."""
    assert (oom_kills() or 0) >= 0
    assert (memory_bytes() or 0) > 1 << 28


GPU = Effective(chunked_prefill=8192, max_running=4096, mem_fraction=0.83, graph_batch=256, context=4096)
CPU = Effective(cpu=True, chunked_prefill=4096, max_running=32, max_tokens=20_000, context=4096)


@pytest.mark.parametrize(
    ("kind", "now", "steps"),
    [
        ("oom_prefill", GPU, [{"chunked-prefill-size": 4096}, {"chunked-prefill-size": 2048},
                              {"mem-fraction-static": 0.8}, {"mem-fraction-static": 0.7},
                              {"mem-fraction-static": 0.6}, None]),
        ("oom_prefill", Effective(chunked_prefill=-1), [{"chunked-prefill-size": 4096}]),  # switched off
        ("oom_decode", Effective(max_running=4096, running=300), [{"max-running-requests": 150}]),
        ("oom_decode", Effective(max_running=9), [{"max-running-requests": 4}, {"mem-fraction-static": 0.8}]),
        ("oom_requests", GPU, [{"max-running-requests": 2048}]),
        ("oom_graph", GPU, [{"cuda-graph-max-bs-decode": 64}, {"cuda-graph-max-bs-decode": 16},
                            {"mem-fraction-static": 0.8}]),
        ("oom_general", GPU, [{"mem-fraction-static": 0.8}, {"mem-fraction-static": 0.7}]),
        ("no_pool", GPU, [{"mem-fraction-static": 0.88}, {"mem-fraction-static": 0.93}, None]),
        ("killed_by_kernel", CPU, [{"max-total-tokens": 10_000}, {"max-total-tokens": 5_000},
                                   {"max-running-requests": 16}]),
        ("killed_by_kernel", GPU, [None]),  # the machine's memory, not the card's
        ("oom_load", GPU, [None]),
        ("crash", GPU, [None]),
        ("port", GPU, [None]),
    ],
)  # fmt: skip
def test_the_guides_order_of_steps(kind: Kind, now: Effective, steps: list[dict[str, float] | None]) -> None:
    """Each death is followed by the next safer step, until there is none."""
    args: dict[str, float] = {}
    lines = _as_log(now)
    for step in steps:
        seen = effective([*lines, _as_arguments(args)], args, cpu=now.cpu)
        change = safer(Death(kind, ""), seen, Flags().spelling)
        assert (dict(change.args) if change else None) == step
        args |= step or {}


def _as_log(now: Effective) -> list[str]:
    """Say in a log what is in effect."""
    values = {
        "chunked_prefill_size": now.chunked_prefill, "max_running_requests": now.max_running,
        "max_total_num_tokens": now.max_tokens, "context_len": now.context,
        "mem_fraction_static": now.mem_fraction, "cuda_graph_max_bs": now.graph_batch,
    }  # fmt: skip
    told = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    running = [f"Decode batch, #running-req: {now.running}, #token: 1"] if now.running else []
    return [f"server_args=ServerArgs({told})", *running]


def _as_arguments(args: dict[str, float]) -> str:
    names = {"max_total_tokens": "max_total_num_tokens", "cuda_graph_max_bs_decode": "cuda_graph_max_bs"}
    plain = [(name.replace("-", "_"), value) for name, value in args.items()]
    return "server_args=" + ", ".join(f"{names.get(name, name)}={value}" for name, value in plain)


def test_a_flag_is_changed_as_the_version_spells_it() -> None:
    """The log of a server names its arguments: the graph's batch is called as there, or left alone."""
    old = of_arguments(None, arguments_told([ARGS])).spelling
    new = of_arguments(None, arguments_told([NEW_ARGS])).spelling
    graph = Death("oom_graph", "")
    assert safer(graph, GPU, old).args == {"cuda-graph-max-bs": 64}  # type: ignore[union-attr]
    assert safer(graph, GPU, new).args == {"cuda-graph-max-bs-decode": 64}  # type: ignore[union-attr]
    without = of_arguments(None, ["mem_fraction_static"]).spelling
    assert safer(graph, GPU, without).args == {"mem-fraction-static": 0.8}  # type: ignore[union-attr]


def test_what_is_in_effect_is_read_from_the_log() -> None:
    """What SGLang chose counts, by the line at ready and by its arguments, of both generations."""
    old = effective([ARGS, "Capture cuda graph bs [1, 2, 4, 160]", READY], {}, cpu=False)
    assert (old.chunked_prefill, old.max_running, old.max_tokens) == (8192, 4096, 665690)
    assert (old.mem_fraction, old.graph_batch, old.context) == (0.83, 160, 65536)
    new = effective([NEW_ARGS], {}, cpu=True)
    assert (new.mem_fraction, new.graph_batch, new.max_tokens, new.conservativeness) == (
        0.716,
        256,
        20000,
        1.0,
    )
    told = effective([], {"chunked-prefill-size": 2048, "max-running-requests": 7}, cpu=False)
    assert (told.chunked_prefill, told.max_running) == (2048, 7)


@pytest.mark.parametrize(
    ("minutes", "retractions", "conservativeness", "changed"),
    [(10, 30, "1.0", True), (10, 8, "1.0", False), (2, 30, "1.0", False), (10, 30, "1.3", False)],
)
def test_frequent_retractions_make_the_next_start_calmer(
    *, minutes: int, retractions: int, conservativeness: str, changed: bool
) -> None:
    """More than one a minute over minutes is frequent; the rank that says so counts once."""
    line = "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.2 -> 0.5"
    log = [f"server_args=ServerArgs(schedule_conservativeness={conservativeness})"]
    log += [
        f"[2026-11-22 10:{n * minutes // retractions:02}:00 TP{rank}] {line}"
        for n in range(retractions)
        for rank in (0, 1)
    ]
    log += [f"[2026-11-22 10:{minutes:02}:00 TP0] Decode batch, #running-req: 5"]
    change = calmer(effective(log, {}, cpu=False))
    assert (change is not None and dict(change.args) == {"schedule-conservativeness": 1.3}) == changed
