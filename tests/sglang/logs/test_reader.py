"""Logs are read whatever their release, encoding, ranks, restarts and damage."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.runner.advise import advise
from batchrunner.sglang.flags import Flags, StatePool
from batchrunner.sglang.logs.lines import ServerReady, origin_of, record_in
from batchrunner.sglang.logs.reader import LogReader
from batchrunner.tuning.rules import apply_all
from batchrunner.tuning.signals import share
from batchrunner.tuning.situation import Situation
from tests.conftest import batchrun
from tests.support.sglang_logs import GUIDES, RETRACTIONS, LogWriter, changes, cuda_oom, interleaved, judged

DEATHS = {
    "Killed": "killed",
    "Loading safetensors checkpoint shards:  75% |███  | 3/4 [00:08<00:02]Killed": "killed",
    "Nov 22 10:00:00 node7 kernel: Out of memory: Killed process 33 (sglang::schedul)": "killed",
    "Child process unexpectedly failed with an exit code 9. pid=33": "killed",
    "Received sigquit from a child process. It usually means the child failed.": "crashed",
    "Fatal Python error: Segmentation fault": "crashed",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "crashed",
    "Rank 0 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), …": "crashed",
}


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
    retracted = "".join(
        f"[2026-03-01 12:0{i}:00 TP{rank}] {text}\n"
        for i in range(9) for text in (GUIDES["G4"][0], RETRACTIONS["G2"]) for rank in range(4)
    )  # fmt: skip
    situation = advise(str(_written(tmp_path / "tp.log", retracted.encode()))).situation
    assert (situation.load.counted, situation.retractions) == (9, 9)


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
@example("server_args=", 12, 0, "{'cuda_graph_max_bs': 'x'}")
@example("[2026-03-01 23:59:30] Decode batch, #running-req: 9, #queue-req: 5", 51, 0, "9" * 5000)
@example("max_total_num_tokens=1, available_gpu_mem=7.00 GB", 46, 0, ".")
def test_no_line_is_too_damaged(line: str, at: int, length: int, junk: str) -> None:
    """Whatever stands in a log, its reader goes on, and the rules have numbers to go by."""
    reader = LogReader()
    at = min(at, len(line))
    damaged = line[:at] + junk + line[at + length :]
    for part in (*damaged.split("\n"), *LogWriter().started().decode(9).lines):
        reader.take(part)
    assert reader.series.counted >= 9
    apply_all(Situation(reader.series, reader.series, reader.facts), Flags())


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_the_encoding_does_not_matter(encoding: str, tmp_path: Path) -> None:
    """A log from another locale is read like any other."""
    words = "café à la crème" if encoding == "latin-1" else "模型加载完成"
    text = f"{words}\r\n" + LogWriter().decode(40, u=0.6).text().replace("\n", f" {words}\r\n")
    found = advise(str(_written(tmp_path / "server.log", text.encode(encoding))))
    assert set(changes(found)) == {"conservative"}
    assert found.situation.load.counted == 40


@pytest.mark.parametrize(
    "content",
    [b"", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 99, b"CUDA out of memory.\n", b"x" * 3_000_000],
)  # fmt: skip
def test_what_is_not_a_log_of_sglang_is_refused(content: bytes, tmp_path: Path) -> None:
    """Another program's log, a picture, an empty file: one line and exit 2, no advice from noise."""
    result = batchrun("advise", _written(tmp_path / "a.log", content))
    assert result.exit_code == 2
    assert "not an SGLang log" in result.stderr
    assert result.stderr.count("\n") == 1


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A log is streamed: a hundred times as long, it takes no more memory."""
    path = tmp_path / "large.log"
    block = LogWriter().decode(7, q=0).decode(993, q=300).text()
    path.write_text(block * 20)
    tracemalloc.start()
    try:
        found = advise(str(path))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found.situation.load.counted == 16_384
    assert share(found.situation.load.samples, "empty") == pytest.approx(0.007, abs=0.0005)


@pytest.mark.parametrize("others", ["TP0", "PP0 ATTN_CP0 MOE_DP1 TP0 EP0"])
def test_limits_and_ranks(others: str) -> None:
    """The limits stand in a line at the start; the DP rank is told from the other ranks."""
    line = (
        f"[2026-11-21 11:59:00 DP1 {others}] max_total_num_tokens=665690, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB"
    )
    assert record_in(line) == ServerReady(665690, 8192, 4096, 65536, gpu_gb=13.5)
    assert origin_of(line).dp == "1"


HYBRID = LogWriter("hybrid").started(
    most=98, mamba_radix_cache_strategy="extra_buffer", before_ready=(
        ("max_running_requests is capped to 98 by the mamba state cache (max_mamba_cache_size=490, 5 state "
        "slots per request). To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or "
        "halve the state size with --mamba-ssm-dtype bfloat16."),
        ("Mamba Cache is allocated. max_mamba_cache_size: 490, conv_state size: 0.60GB, ssm_state size: "
        "23.40GB "),
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 450000, K size: 13.00 GB, V size: 13.00 GB",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 450000, K size: 1.00 GB, V size: 1.00 GB",
    ),
).decode(9, r=49, u=0.3)  # fmt: skip
"""Lines of 0.5.23 (kv_cache_configurator.py, memory_pool.py); the last pool is that of a draft model."""


def test_both_pools_of_a_hybrid_model_are_read(tmp_path: Path) -> None:
    """Its pools are told apart: their sizes when it starts, and how full each is in every line."""
    log = LogReader().read(HYBRID.write(tmp_path))
    pool = log.facts.states
    assert pool == StatePool(slots=490, per_request=5, gb=24.0, kv_gb=26.0)
    assert pool.most_running == 98
    assert log.facts.state_share == 0.48
    assert (log.series.median("usage"), log.series.median("state_usage")) == (0.3, 0.5)


def test_states_of_drafted_tokens_belong_to_the_state_pool(tmp_path: Path) -> None:
    """With speculation, the line about the pool names the memory of these states too, which grows with it."""
    sizes = "max_mamba_cache_size: 98, conv_state size: 0.30GB, ssm_state size: 12.40GB "
    drafted = "intermediate_ssm_state_cache size: 9.10GB intermediate_conv_window_cache size: 0.20GB "
    log = LogWriter("hybrid").started(before_ready=(f"Mamba Cache is allocated. {sizes}{drafted}",)).decode(1)
    pool = LogReader().read(log.write(tmp_path)).facts.states
    assert pool is not None
    assert pool.gb == pytest.approx(22)


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ({"mamba_radix_cache_strategy": "no_buffer"}, 3),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, 5),
        ({"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer", "disable_radix_cache": True}, 1),
    ],
)
def test_states_of_a_request(arguments: dict[str, Any], slots: int, tmp_path: Path) -> None:
    """A server whose state pool caps nothing names no states a request: its arguments tell."""
    sizes = "max_mamba_cache_size: 60, conv_state size: 0.10GB, ssm_state size: 2.00GB "
    allocated = f"Mamba Cache is allocated. {sizes}"
    log = LogWriter("hybrid").started(before_ready=(allocated,), **arguments).decode(1)
    pool = LogReader().read(log.write(tmp_path)).facts.states
    assert pool is not None
    assert (pool.per_request, pool.most_running) == (slots, 60 // slots)
