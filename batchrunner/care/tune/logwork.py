"""What only a server's log tells of a trial: its forward passes, its graphs, the memory left. Pure."""

from __future__ import annotations

import re
from typing import Any

LOG_INTERVAL = 10
"""Trials' `decode-log-interval`: passes are counted to within 10, and a line costs next to nothing."""
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")
_GRAPH = re.compile(r"Decode batch\b.*cuda graph: (True|False)")
_READY = {
    "spare_gb": (re.compile(r"available_gpu_mem=([\d.]+)"), float),
    "prefill_limit": (re.compile(r"chunked_prefill_size=(\d+)"), int),
    "mem_fraction": (re.compile(r"mem_fraction_static=([\d.]+)"), float),
    "attention_backend": (re.compile(r"\battention_backend='(\w+)'"), str),
}


def signs_at_start(text: str) -> dict[str, Any]:
    """Return what the log says of the server's set-up, as fields of `Signs`."""
    found = {name: pattern.search(text) for name, (pattern, _) in _READY.items()}
    return {name: _READY[name][1](match[1]) for name, match in found.items() if match}


def signs_of_work(text: str, tokens: int) -> dict[str, Any]:
    """Return what the log of a time with so many output tokens says of its passes, as fields of `Signs`."""
    prefilled = [int(count) for count in _PREFILL.findall(text)]
    passes = LOG_INTERVAL * text.count("Decode batch") + len(prefilled)
    graphs = _GRAPH.findall(text)
    return {
        "tokens_per_pass": round(tokens / passes, 3) if passes else None,
        "prefill_per_pass": round(sum(prefilled) / len(prefilled), 1) if prefilled else None,
        "graph_off_share": round(graphs.count("False") / len(graphs), 3) if graphs else None,
    }
