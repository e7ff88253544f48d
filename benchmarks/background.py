"""What do the users of a server notice of a run in the background, and what is used of the time they leave?

A real engine on the CPU with a tiny random model. Users come by themselves (open loop): Poisson in bursts of
200 passes on average with pauses of 300. They are alone first, then beside `batchrun --background`. The
scheduler itself counts, in a file: a line for each request that arrives, and for each forward pass with its
users. So figures are in passes, free of the machine's noise: from a user's arrival to its first token, and
between two of its tokens. Idle capacity is what rows without users have running together, less the users.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp

from batchrunner.core.console import tell
from batchrunner.engines.simulation.scheduler import SchedulerConfig
from benchmarks.engine import KEY, SERVER_ARGS, Server, job_for, serve, write_input
from benchmarks.measure import post_all, save
from tests.support.shared_engine import SharedEngine, p99
from tests.support.tiny_model import make_tiny_llama

GOALS = {"on": (1.10, 0.80), "off": (1.6, 0.6)}
"""Most of p99 beside users alone, and least of the idle capacity, with priorities and without."""
ARGS = {**SERVER_ARGS, "max-running-requests": 32, "decode-log-interval": 100}
PRIORITIES = {
    "enable-priority-scheduling": True, "default-priority-value": 0, "retraction-policy": "priority",
}  # fmt: skip
USERS_A_PASS, BURST_PASSES, PAUSE_PASSES = 0.15, 200, 300
"""A user has 40 tokens on average: six users run together in a burst."""
USER = "user-"
ROW_TOKENS = 290
"""Tokens of a row that runs, on average, in virtual time."""
COUNTS = "BENCH_BACKGROUND_COUNTS"
HOOK = '''
"""Lets SGLang's scheduler write down its passes: Python imports this file at its start."""
import os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

NAME = "sglang.srt.managers.scheduler"

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module.Scheduler)
        spec.loader.exec_module = exec_module
        return spec

def patch(scheduler):
    out = open(f"{os.environ['%(counts)s']}.{os.getpid()}", "a", buffering=1)
    run_batch, arrives = scheduler.run_batch, scheduler._add_request_to_queue
    def counted(self, batch, *args, **named):
        users = " ".join(req.rid for req in batch.reqs if req.rid.startswith("%(user)s"))
        kind = "P" if batch.forward_mode.is_extend() else "D"
        out.write(f"{kind} {len(batch.reqs)} {users}\\n")
        return run_batch(self, batch, *args, **named)
    def arrived(self, req, *args, **named):
        if req.rid.startswith("%(user)s"):
            out.write(f"A 0 {req.rid}\\n")
        return arrives(self, req, *args, **named)
    scheduler.run_batch, scheduler._add_request_to_queue = counted, arrived

sys.meta_path.insert(0, Finder())
'''
FORKS = Path("tests/support/engine_site/sitecustomize.py")
"""Lets a server's processes be forks: they start with a third of the CPU time."""


@dataclass(slots=True)
class Counts:
    """What the scheduler wrote of a stretch of time."""

    first_token: list[int] = field(default_factory=list)
    """Passes from each user's arrival to its first token."""
    gaps: list[int] = field(default_factory=list)
    """Passes from each token of a user to the next."""
    decode_passes: int = 0
    passes: int = 0
    users: int = 0
    """Sum over decode passes of the users in them."""
    running: int = 0

    @classmethod
    def read(cls, lines: Sequence[str]) -> Counts:
        counts, arrived, last, began = cls(), dict[str, int](), dict[str, int](), set[str]()
        for line in lines:
            kind, size, *users = line.split()
            if kind == "A":
                arrived.setdefault(users[0], counts.passes)
                continue
            counts.passes += 1
            if kind == "D":
                counts.decode_passes += 1
                counts.users += len(users)
                counts.running += int(size)
            for user in users:
                if kind == "D" and user not in began and user in last and user in arrived:
                    began.add(user)
                    counts.first_token.append(last[user] - arrived[user])
                if kind == "D" and user in last:
                    counts.gaps.append(counts.passes - last[user])
                last[user] = counts.passes
        return counts

    @property
    def running_mean(self) -> float:
        return round(self.running / max(1, self.decode_passes), 2)

    def as_dict(self) -> dict[str, Any]:
        return {
            **_figures("first_token", self.first_token),
            **_figures("gap", self.gaps),
            "passes": self.passes,
            "users_running": round(self.users / max(1, self.decode_passes), 2),
            "running": self.running_mean,
        }


def _figures(name: str, values: list[int]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        f"{name}s": len(ordered),
        f"{name}_p50": ordered[len(ordered) // 2],
        f"{name}_p99": ordered[int(0.99 * len(ordered))],
        f"{name}_mean": round(sum(ordered) / len(ordered), 3),
    }


class Watched:
    """Servers whose schedulers write down their passes."""

    def __init__(self, folder: Path) -> None:
        self._counts = folder / "counts"
        self._at = defaultdict[Path, int](int)

    def files(self) -> list[Path]:
        return sorted(self._counts.parent.glob("counts.*"))

    def environment(self) -> None:
        site = self._counts.parent / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(HOOK % {"counts": COUNTS, "user": USER} + FORKS.read_text())
        os.environ["PYTHONPATH"] = f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        os.environ[COUNTS] = str(self._counts)

    def since_last(self) -> Counts:
        """Return what all schedulers wrote since the last call, one after the other."""
        lines: list[str] = []
        for file in self.files():
            with file.open() as source:
                source.seek(self._at[file])
                lines += source.read().splitlines()
                self._at[file] = source.tell()
        return Counts.read(lines)


async def use(urls: Sequence[str], seconds: float, seed: int, pass_s: float) -> None:
    """Be the users of servers: each comes when it comes, whether others were answered or not."""
    luck, began, number = random.Random(seed), time.monotonic(), 0
    burst_s, pause_s = BURST_PASSES * pass_s, PAUSE_PASSES * pass_s
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(url: str, body: dict[str, Any]) -> None:
            async with session.post(url + "/generate", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

        asks = []
        burst_ends = began + luck.expovariate(1 / burst_s)
        while (now := time.monotonic()) < began + seconds:
            if now >= burst_ends:
                await asyncio.sleep(luck.expovariate(1 / pause_s))
                burst_ends = time.monotonic() + luck.expovariate(1 / burst_s)
                continue
            ids = [luck.randrange(100, 45_000) for _ in range(luck.randint(30, 90))]
            sampling = {"max_new_tokens": luck.randint(20, 60), "ignore_eos": True, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": sampling, "rid": f"{USER}{seed}-{number}"}
            number += 1
            asks.append(asyncio.create_task(ask(luck.choice(urls), body)))
            await asyncio.sleep(luck.expovariate(USERS_A_PASS / pass_s))
        await asyncio.gather(*asks)


def seconds_of_a_pass(server: Server) -> float:
    """Measure how long a pass takes on this machine now, with as many rows as users there are in a burst."""
    body = {
        "input_ids": [[100 + row, *range(200, 250)] for row in range(6)],
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
    }
    wall_s, _ = asyncio.run(post_all(server.url + "/generate", [json.dumps(body).encode()], 1, KEY))
    return wall_s / 200


@contextlib.contextmanager
def batch(job: dict[str, Any], folder: Path, *options: str) -> Iterator[None]:
    """Let a run go on meanwhile; it is stopped in the end."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    command = [sys.executable, "-m", "batchrunner", "run", str(file), "--fresh", *options]
    with (folder / "run.log").open("ab") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        running.terminate()
        running.wait(timeout=60)


def case(folder: Path, args: dict[str, Any], seconds: float, *, replicas: int) -> dict[str, Any]:
    """Measure users alone, then beside a run, and the run alone; of two replicas users know one only."""
    watched = Watched(folder)
    watched.environment()
    model = make_tiny_llama(folder / "tiny", Path("data/smollm2-135m-instruct"))
    write_input(folder / "input.parquet", 6000)
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [
            stack.enter_context(serve(model, folder, args, name=f"server{number}"))
            for number in range(replicas)
        ]
        urls = [server.url for server in servers]
        job = job_for(folder / "input.parquet", folder / "run", urls[0])
        job["engine"]["urls"] = urls
        asyncio.run(use(urls[:1], 10, 0, 0.05))  # the first requests meet cold code paths
        watched.since_last()
        pass_s = seconds_of_a_pass(servers[0])
        asyncio.run(use(urls[:1], seconds, 1, pass_s))
        alone = watched.since_last().as_dict()
        with batch(job, folder, "--background"):
            time.sleep(seconds / 4)
            watched.since_last()
            asyncio.run(use(urls[:1], seconds, 1, pass_s))
            beside = watched.since_last().as_dict()
        report = json.loads((folder / "run" / "report.json").read_text())
        watched.since_last()
        with batch(job, folder):
            time.sleep(seconds / 2)
            full = watched.since_last().running_mean
    ours = beside["running"] - beside["users_running"]
    found = {
        "pass_ms": round(1000 * pass_s, 1), "alone": alone, "beside": beside, "running_without_users": full,
        "background": report["load"]["background"],
        "first_token_ratio": round(beside["first_token_p99"] / alone["first_token_p99"], 3),
        "gap_ratio": round(beside["gap_p99"] / alone["gap_p99"], 3),
        "idle_used": round(ours / (full - beside["users_running"]), 3),
    }  # fmt: skip
    tell(json.dumps(found))
    return found


def in_virtual_time(seconds: float) -> dict[str, Any]:
    """Measure the same on the simulated scheduler, with the passes of an 8B model on an H100."""
    found = {}
    for slots, pool in ((32, 100_000), (128, 30_000), (128, 100_000)):
        for rate in (5, 20):
            for name, priorities in (("on", True), ("off", False)):
                config = SchedulerConfig(slots, pool)
                alone, beside = (
                    SharedEngine([rate], priorities=priorities, ours=ours, config=config).run(seconds)
                    for ours in (False, True)
                )
                users, ours = (sum(each) / len(beside.running) for each in zip(*beside.running, strict=True))
                before, after = alone.schedulers()[0], beside.schedulers()[0]
                found[f"{name}, {slots} slots, pool {pool:,}, {rate} users/s"] = {
                    "first_token_p99": (p99(before.first_token_passes), p99(after.first_token_passes)),
                    "gap_p99": (p99(before.gaps), p99(after.gaps)),
                    "gap_mean": tuple(round(mean(gaps), 2) for gaps in (before.gaps, after.gaps)),
                    "idle_used": round(ours / (min(slots, pool / ROW_TOKENS) - users), 2),
                    "given_back": round(beside.lost / beside.ended, 3),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", nargs="+", default=["on", "off", "replicas"])
    parser.add_argument("--virtual", action="store_true", help="on the simulated scheduler")
    wanted = parser.parse_args()
    if wanted.virtual:
        figures = in_virtual_time(100.0)
        save(
            "background_simulated",
            "\n".join(f"{k}: {v}" for k, v in figures.items()),
            figures,
            ("batchrunner",),
        )
        return
    found = {}
    for name in wanted.cases:
        args = dict(ARGS) if name == "off" else {**ARGS, **PRIORITIES}
        with tempfile.TemporaryDirectory(prefix="bench-background-") as scratch:
            found[name] = case(Path(scratch), args, wanted.seconds, replicas=1 + (name == "replicas"))
    line = "background: " + "; ".join(
        f"{name}: p99 to the first token x {one['first_token_ratio']}, between tokens x {one['gap_ratio']}, "
        f"{one['idle_used']:.0%} of the idle capacity used"
        for name, one in found.items()
    )
    figures = {"goals": GOALS, "server_args": ARGS, "priorities": PRIORITIES, "cases": found}
    save("background", line, figures, ("batchrunner", "sglang", "torch", "aiohttp"))


if __name__ == "__main__":
    main()
