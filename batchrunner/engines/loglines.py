"""The load out of a server's log: for releases that tell it nowhere else. Pure: lines in, Signals out.

SGLang writes `Decode batch` and `Prefill batch` lines of `name: value` pairs. Which pairs there are, and in
which order, changed with nearly every release, so pairs are looked up by name and never by place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchrunner.records import Signals

if TYPE_CHECKING:
    from collections.abc import Iterable

_BATCH = re.compile(r"\b(?:Decode|Prefill) batch\b[.,]?(?P<pairs>.*)")
_PAIR = re.compile(r"(?P<name>[#\w][\w \-/()#]*?): *(?P<value>-?[\d.]+)")
_RANK = re.compile(r"^\[[^\]]*\bDP(?P<rank>\d+)\b")
_LIMITS = re.compile(r"\b(?P<name>max_total_num_tokens|max_running_requests)=(?P<value>\d+)")


class LogLoad:
    """The newest load of each scheduler that a log has told of."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._limits: dict[str, int] = {}
        self._newest: dict[str, dict[str, float]] = {}
        self._told = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the next lines of the log."""
        for line in lines:
            for limit in _LIMITS.finditer(line):
                self._limits[limit["name"]] = int(limit["value"])
            batch = _BATCH.search(line)
            if batch is None:
                continue
            pairs = {pair["name"].strip(): float(pair["value"]) for pair in _PAIR.finditer(batch["pairs"])}
            if "#running-req" not in pairs or "#queue-req" not in pairs:
                continue
            rank = _RANK.search(line)
            self._told += 1
            self._newest[rank["rank"] if rank else ""] = {**pairs, "told": self._told}

    def signals(self) -> list[Signals]:
        """Return the newest load of each scheduler."""
        return [
            Signals(
                scheduler=f"{self._url}#dp{rank}" if rank else self._url,
                source="log",
                running=int(pairs["#running-req"]),
                queue=int(pairs["#queue-req"]),
                # hybrid models have a pool of each kind of layer, and the fuller one limits
                token_usage=max((v for n, v in pairs.items() if n.endswith("token usage")), default=0.0),
                used_tokens=int(pairs["#token"]) if "#token" in pairs else None,
                max_total_tokens=self._limits.get("max_total_num_tokens"),
                max_running=self._limits.get("max_running_requests"),
                route=self._url,
                taken_at=pairs["told"],
                work=pairs["told"],
            )
            for rank, pairs in sorted(self._newest.items())
        ]
