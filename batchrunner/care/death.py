"""Why an engine died: what its log, its exit status and the kernel say together. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batchrunner.engines.serverlog import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Kind = Literal[
    "oom_prefill",
    "oom_decode",
    "oom_graph",
    "oom_requests",
    "oom_general",
    "oom_load",
    "no_pool",
    "killed_by_kernel",
    "port",
    "crash",
]

NAMES: dict[Kind, str] = {
    "oom_prefill": "out of memory in prefill",
    "oom_decode": "out of memory in decode",
    "oom_graph": "out of memory at graph capture",
    "oom_requests": "out of request slots",
    "oom_general": "out of memory",
    "oom_load": "the weights do not fit",
    "no_pool": "no room for a KV pool",
    "killed_by_kernel": "killed by the kernel for want of memory",
    "port": "a port was taken",
    "crash": "a crash",
}

KILLED = 128 + 9
"""The launcher's exit status of a server that SIGKILL ended."""

# What an exception of each release says (engine-facts §2; torch's, CUDA's and NCCL's own). A retraction says
# "decode out of memory happened" too, and the end of a row "even after retracting": nothing dies of these.
_MEMORY = re.compile(
    r"(?!.*(?:#retracted_reqs|even after retracting))"
    r"(?:[\w.]*(?:Error|Exception)\b: .*(?:out of memory|not enough memory|can't allocate memory|\bOOM\b"
    r"|CUBLAS_STATUS_ALLOC_FAILED|leave no GPU memory)"
    r"|MemoryError\b|Cuda failure .*out of memory|(?:Prefill |Decode )?out of memory\. Try to lower"
    r"|alloc_req_slots runs out of memory)",
    re.IGNORECASE,
)
_BY_WORDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("oom_graph", re.compile(r"Capture .*graph failed")),
    ("no_pool", re.compile(r"Not enough memory\. Please try to increase|leave no GPU memory for the KV")),
    ("oom_requests", re.compile(r"alloc_req_slots")),
    ("oom_prefill", re.compile(r"Prefill out of memory")),
    ("oom_decode", re.compile(r"Decode out of memory")),
)
_STAGES: tuple[tuple[str, Kind | None], ...] = (
    ("Load weight begin", "oom_load"),
    ("Load weight end", "oom_general"),  # the pool, which mem-fraction-static sizes
    ("graph begin", "oom_graph"),
    ("max_total_num_tokens=", None),  # ready: the traceback tells more
)
_FRAME = re.compile(r'File "(?:.*/)?(?P<file>[^/"]+)", line \d+, in (?P<function>\S+)')
_PASSES: tuple[tuple[str, Kind], ...] = (
    ("decode", "oom_decode"), ("extend", "oom_prefill"), ("prefill", "oom_prefill"),
)  # fmt: skip
_KILLED_CHILD = re.compile(r"exit ?code:? -9\b")


@dataclass(frozen=True, slots=True)
class Life:
    """What the life of a server left behind."""

    lines: Sequence[str]
    """The beginning and the end of its log."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """What it was started with, as `engine.args` has it."""
    code: int | None = None
    """Its exit status, 128 + signal where a signal ended it."""
    oom_kills: int = 0
    """Processes of our cgroup that the kernel killed for want of memory in that time."""


@dataclass(frozen=True, slots=True)
class Death:
    """What a server died of."""

    kind: Kind
    why: str
    """The line of the log that says so, or a sentence."""

    @property
    def of_memory(self) -> bool:
        """Whether memory was wanting, so that less of something helps: no row is to blame."""
        return self.kind not in {"port", "crash"}


def examine(life: Life) -> Death:
    """Tell what a server died of."""
    lines = [clean(line) for line in life.lines]
    found = next((n for n in reversed(range(len(lines))) if _MEMORY.match(lines[n])), None)
    if found is not None:
        return Death(_kind_of(lines, found), lines[found][:300])
    if life.oom_kills and (life.code == KILLED or any(map(_KILLED_CHILD.search, lines))):
        return Death("killed_by_kernel", f"the kernel killed {life.oom_kills} processes for want of memory")
    if any("address already in use" in line.lower() for line in lines):
        return Death("port", "address already in use")
    return Death("crash", "" if life.code is None else f"exit {life.code}")


def _kind_of(lines: Sequence[str], at: int) -> Kind:
    """Tell which memory was wanting, by the words, how far the start had come, and the traceback."""
    by_words = next((kind for kind, words in _BY_WORDS if words.search(lines[at])), None)
    if by_words is not None:
        return by_words
    stage: Kind | None = "oom_general"
    for line in lines[:at]:
        stage = next((kind for mark, kind in _STAGES if mark in line), stage)
    return stage or _pass_of(reversed(lines[:at]))


def _pass_of(lines: Iterable[str]) -> Kind:
    """Tell the forward pass from the innermost frame that names one; SGLang's functions and files do."""
    for line in lines:
        if line.endswith("Traceback (most recent call last):"):
            break
        frame = _FRAME.match(line)
        if frame:
            name = f"{frame['file']} {frame['function']}".lower()
            kind = next((kind for word, kind in _PASSES if word in name), None)
            if kind is not None:
                return kind
    return "oom_general"
