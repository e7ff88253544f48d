"""What the benchmarks share: the bare client, how they repeat, and where the figures go."""

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import comb
from pathlib import Path
from typing import Any

import aiohttp

RESULTS = Path(__file__).parent / "results"
SIDE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with the order statistics around it that hold the true one in at least nine of ten cases."""

    median: float
    low: float
    high: float
    confidence: float
    """That low..high holds the true median, whatever the distribution; below 0.9 with fewer than 5 values."""

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float]) -> Interval:
    """Take the narrowest symmetric interval of order statistics with a confidence of 0.9 or more."""
    ordered, n = sorted(values), len(values)
    cut = 0
    while cut + 1 < n - 1 - cut and _confidence(n, cut + 1) >= 0.9:
        cut += 1
    return Interval(
        statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], round(_confidence(n, cut), 4)
    )


def _confidence(n: int, cut: int) -> float:
    """Hold the median between the values of rank cut and n - 1 - cut: 1 - 2 P(Binomial(n, 1/2) <= cut)."""
    return 1 - 2 * sum(comb(n, k) for k in range(cut + 1)) / float(2**n)


async def post_all(
    url: str, bodies: Sequence[bytes], window: int, key: str = ""
) -> tuple[float, list[bytes]]:
    """Post all bodies, so many at a time, by as plain a loop as one would write.

    Return the seconds from the first request to the last answer, and the answers.
    """
    waiting = iter(enumerate(bodies))
    answers = [b""] * len(bodies)

    async def work(session: aiohttp.ClientSession) -> None:
        for at, body in waiting:
            async with session.post(url, data=body) as response:
                assert response.status == 200
                answers[at] = await response.read()

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=3600),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    ) as session:
        began = time.perf_counter()
        await asyncio.gather(*(work(session) for _ in range(window)))
        wall_s = time.perf_counter() - began
    return wall_s, answers


def in_turns(sides: Mapping[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Run all sides so many times, each round beginning with another one."""
    names = list(sides)
    found = []
    for turn in range(rounds):
        first = turn % len(names)
        found.append({name: sides[name]() for name in names[first:] + names[:first]})
    return found


def peak_mb(pid: int | str = "self") -> float:
    """Return a process's high-water mark; ru_maxrss would begin at that of the process that started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(kilobytes) / 1024, 1)


def in_fresh_process(module: str, *arguments: str, timeout_s: float = SIDE_TIMEOUT_S) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS…`, which prints one JSON object last, and return that."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        check=False, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{module} {' '.join(arguments)} failed ({done.returncode}):\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def machine() -> dict[str, Any]:
    """Say where the figures come from."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform(terse=True)}


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of Python and of these packages."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Return the commit that is checked out; None outside of a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        check=False, capture_output=True, text=True, cwd=RESULTS.parent,
    )  # fmt: skip
    return done.stdout.strip() or None


def save(
    name: str, line: str, figures: dict[str, Any], packages: Sequence[str], module: str | None = None
) -> None:
    """Write `results/NAME.json` and print the line of the benchmark, whose module is NAME by default."""
    document = {
        "line": line,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.{module or name} {' '.join(sys.argv[1:])}".strip(),
        "machine": {**machine(), "load_average_at_end": [round(load, 2) for load in os.getloadavg()]},
        "versions": versions(*packages),
        "commit": commit(),
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(document, indent=1, default=_plain)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(line)


def _plain(value: object) -> object:
    if isinstance(value, Interval):
        return asdict(value)
    raise TypeError(f"not for JSON: {value!r}")
