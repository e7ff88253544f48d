"""Does the simulated scheduler do what the real one does? The same rows to both, pass counts compared.

SGLang on the CPU serves a tiny random model and logs a line for each forward pass. Every workload goes to
it once, and then to `engines/simulation/scheduler.py` with the same flags, rows and order, in steps instead
of seconds. How long each output became is the model's whim where rows may stop early, so the simulator is
told, and so is how the first window of rows arrived; who waited, ran, was cached or sent back it finds out.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from batchrunner.core.console import tell
from batchrunner.engines.simulation.scheduler import CLIP_TOKENS, Scheduler, SchedulerConfig, SimulatedRequest
from benchmarks.engine import KEY, VOCABULARY, Log, Server, flush, serve, work_in, work_of
from benchmarks.measure import post_all, save
from tests.support.tiny_model import make_tiny_llama

SEED = 11
GOAL = 0.10
"""How far passes, mean running and mean queue may be apart."""
STOP_TOKENS = (600, 100)
"""Tokens that stop an output, of about 49,000: a random model stops after 82 or 490 tokens on average."""
FULL = 0.95
"""Share of the window that must be at the server on average; with less the client did not keep up."""
TRIES = 3
PASS = r"batch, (?:#new-seq: (\d+))?.*?#running-req: (\d+).*?#queue-req: (\d+)"
"""Figures of a pass in a line of the log; the first group is empty for a decode pass."""
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
ANSWER_PASSES = 1
"""A finished row's successor reaches the scheduler this many passes after its first chance to."""


@dataclass(frozen=True, slots=True)
class Row:
    ids: list[int]
    asked: int
    stop_tokens: int | None = None
    """How many tokens of the vocabulary end it early; None: it ignores them (`ignore_eos`)."""
    prefix: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    window: int
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Setting:
    """One server, and what it serves."""

    args: dict[str, Any]
    workloads: list[Workload] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_running=self.args["max-running-requests"],
            max_total_tokens=self.args["max-total-tokens"],
            context_tokens=4096,
            chunked_prefill_tokens=self.args["chunked-prefill-size"],
            max_prefill_tokens=self.args["max-prefill-tokens"],
            conservativeness=self.args.get("schedule-conservativeness", 1.0),
            clip_tokens=int(self.env.get(CLIP, CLIP_TOKENS)),
            decode_interval=self.args.get("prefill-decode-interval", 0),
        )


COMMON_ARGS = {
    "decode-log-interval": 1, "chunked-prefill-size": 2048, "max-prefill-tokens": 4096, "sleep-on-idle": True,
}  # fmt: skip


def settings() -> Iterator[Setting]:
    made = random.Random(SEED)

    def ids(tokens: int) -> list[int]:
        return [made.randrange(*VOCABULARY) for _ in range(tokens)]

    def plain(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Row]:
        return [Row(ids(made.randint(*prompt)), made.randint(*output)) for _ in range(count)]

    def chat(count: int) -> list[Row]:
        lengths = [(made.lognormvariate(4.3, 0.8), made.lognormvariate(3.8, 0.8)) for _ in range(count)]
        return [Row(ids(1 + int(p) % 1000), 1 + int(o) % 500) for p, o in lengths]

    def shared(groups: int, each: int, output: tuple[int, int]) -> list[list[Row]]:
        found = []
        for group in range(groups):
            head = ids(430)
            prefix = ((f"group {group}", len(head)),)
            found.append([
                Row(head + ids(made.randint(20, 44)), made.randint(*output), prefix=prefix)
                for _ in range(each)
            ])  # fmt: skip
        return found

    def stopping(count: int, asked: int, stop_tokens: int) -> list[Row]:
        return [Row(ids(made.randint(32, 128)), asked, stop_tokens) for _ in range(count)]

    def stopping_groups(groups: int, each: int, asked: int, stop_tokens: int) -> list[Row]:
        rows = [row for group in shared(groups, each, (1, 1)) for row in group]
        found = [Row(row.ids[230:], asked, stop_tokens, ((row.prefix[0][0], 200),)) for row in rows]
        return made.sample(found, len(found))

    groups = shared(60, 8, (8, 40))
    in_order = [row for group in groups for row in group]
    shuffled = made.sample(in_order, len(in_order))
    leaders_first = [
        row
        for at in range(0, len(groups), 20)
        for turn in zip(*groups[at : at + 20], strict=True)
        for row in turn
    ]
    yield Setting(
        {**COMMON_ARGS, "max-total-tokens": 40_000, "max-running-requests": 128},
        [
            Workload("short prompts, short outputs", 400, plain(600, (32, 96), (8, 32))),
            Workload("short prompts, long outputs", 250, plain(160, (32, 96), (50, 200))),
            Workload("long prompts, short outputs", 200, plain(200, (400, 1200), (8, 32))),
            Workload("chat, lognormal", 220, chat(300)),
            Workload("chat, small window", 64, chat(200)),
            Workload("outputs that stop early", 60, stopping(90, 300, STOP_TOKENS[0])),
            Workload("shared prefixes, in order", 300, in_order),
            Workload("shared prefixes, shuffled", 300, shuffled),
            Workload("shared prefixes, leaders first", 300, leaders_first),
        ],
    )
    yield Setting(
        {
            **COMMON_ARGS, "max-total-tokens": 6_000, "max-running-requests": 96,
            "chunked-prefill-size": 256, "schedule-conservativeness": 0.1,
        },
        [
            Workload("starved, retractions", 60, stopping(60, 200, STOP_TOKENS[1])),
            Workload("starved, retractions, prefixes", 60, stopping_groups(10, 6, 200, STOP_TOKENS[1])),
            Workload("starved, nothing stops early", 120, plain(150, (32, 96), (50, 200))),
            Workload("starved, shared prefixes", 200, shuffled[:240]),
            Workload("long prompts in chunks", 100, plain(80, (400, 1200), (8, 100))),
        ],
    )  # fmt: skip


def arrivals(log: str, window: int) -> list[int]:
    """Return how many rows had arrived at each pass, until all of the first window had.

    A burst takes the server's HTTP side a second, and how long depends on who else uses the machine.
    """
    found: list[int] = []
    admitted = 0
    for new, _, queue in re.findall(PASS, log):
        admitted += int(new or 0)
        found.append(max(admitted + int(queue), found[-1] if found else 0))
        if found[-1] >= window:
            break
    return found


def body_of(row: Row) -> bytes:
    """Return the request of a row."""
    sampling: dict[str, Any] = {"max_new_tokens": row.asked}
    if row.stop_tokens is None:
        sampling |= {"temperature": 0, "ignore_eos": True}
    else:
        stop_ids = random.Random(SEED).sample(range(*VOCABULARY), max(STOP_TOKENS))
        sampling |= {"temperature": 1, "stop_token_ids": stop_ids[: row.stop_tokens]}
    return orjson.dumps({"input_ids": row.ids, "sampling_params": sampling})


def really(server: Server, workload: Workload) -> tuple[dict[str, Any], list[int], list[int]]:
    """Serve the rows; return the work, the outputs' lengths and the arrivals of the first window."""
    flush(server)
    log, bodies = Log(server.log), list(map(body_of, workload.rows))
    wall_s, answers = asyncio.run(post_all(server.url + "/generate", bodies, workload.window, KEY))
    outputs = [orjson.loads(answer)["meta_info"]["completion_tokens"] for answer in answers]
    time.sleep(0.5)  # the last line of the log
    text = log.text()
    kept_full = round(window_used(text, workload), 3)
    work = {**work_of(text), "window_used": kept_full, "wall_s": round(wall_s, 1)}
    return work, outputs, arrivals(text, workload.window)


def window_used(log: str, workload: Workload) -> float:
    """Return the mean share of the window that was at the server while there were rows to send.

    Below `FULL` the client fell behind, on a machine busy with other things: the run says little of the
    scheduler and is repeated.
    """
    shares: list[float] = []
    admitted = 0
    for new, running, queue in re.findall(PASS, log):
        admitted += int(new or 0)
        at_server = int(new or 0) + int(running) + int(queue)
        if shares or at_server >= FULL * workload.window:  # the ramp is over
            shares.append(at_server / workload.window)
        if admitted + int(queue) >= len(workload.rows):
            break
    return sum(shares) / len(shares) if shares else 1.0


@dataclass(slots=True)
class Client:
    """Who sends the rows to the simulator: the first window as it came, then one for each that ended."""

    rows: Iterator[tuple[Row, int]]
    """With how many tokens each will put out."""
    due: deque[tuple[int, SimulatedRequest]] = field(default_factory=deque)
    """What is on its way, and at which pass it arrives."""

    def send(self, count: int, at_pass: int) -> None:
        for row, tokens in islice(self.rows, count):
            fixed = row.stop_tokens is None
            sample = SimulatedRequest(len(row.ids), tokens, row.asked, ignore_eos=fixed, prefix=row.prefix)
            insort(self.due, (at_pass, sample), key=itemgetter(0))

    def arrived(self, passes: int) -> Iterator[SimulatedRequest]:
        while self.due and self.due[0][0] <= passes:
            yield self.due.popleft()[1]


def simulated(
    config: SchedulerConfig, workload: Workload, outputs: list[int], ramp: list[int]
) -> dict[str, Any]:
    """Run the rows through the simulator, each finished one replaced `ANSWER_PASSES` later."""
    began = time.perf_counter()
    scheduler = Scheduler(config)
    client = Client(iter(zip(workload.rows, outputs, strict=True)))
    counts = [arrived for arrived in ramp if arrived < workload.window]
    for at_pass, (before, arrived) in enumerate(pairwise([0, *counts, workload.window])):
        client.send(arrived - before, at_pass)
    running = queue = passes = 0
    while scheduler.in_flight or client.due:
        for sample in client.arrived(passes):
            scheduler.submit(sample)
        result = scheduler.step(client.due[0][0] - passes if client.due else sys.maxsize)
        if result is None:
            passes = client.due[0][0]
            continue
        passes += result.steps
        queue += result.queue * result.steps
        running += result.running * result.steps if result.kind == "decode" else 0
        client.send(len(result.finished), passes + ANSWER_PASSES)
    found = work_in(
        decode_passes=scheduler.decode_passes,
        prefill_passes=scheduler.prefill_passes,
        running=running,
        queue=queue,
        prefilled=scheduler.prefilled_tokens,
        cached=scheduler.cached_tokens,
        retracted=scheduler.retractions,
    )
    return {**found, "wall_s": round(time.perf_counter() - began, 3)}


def measure(model: Path | None, tokenizer: Path, only: str) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-simulation-") as scratch:
        folder = Path(scratch)
        made = make_tiny_llama(model or folder / "tiny", tokenizer)
        for number, setting in enumerate(settings()):
            chosen = [workload for workload in setting.workloads if only in workload.name]
            if not chosen:
                continue
            place = folder / str(number)
            place.mkdir()
            with serve(made, place, setting.args) as server:
                really(server, Workload("warm-up", 100, chosen[0].rows[:100]))  # cold code paths
                for workload in chosen:
                    for _ in range(TRIES):
                        real, outputs, ramp = really(server, workload)
                        if real["window_used"] >= FULL:
                            break
                    simulation = simulated(setting.config, workload, outputs, ramp)
                    found.append(compared(setting, workload, real, simulation))
                text = server.log.read_text(errors="replace")
                tell(*re.findall(r"max_total_num_tokens=.*", text)[:1])
    return found


def compared(
    setting: Setting, workload: Workload, real: dict[str, Any], simulation: dict[str, Any]
) -> dict[str, Any]:
    apart = {
        key: round(simulation[key] / real[key] - 1, 4) if real[key] else None
        for key in (
            "passes",
            "decode_passes",
            "prefill_passes",
            "running_mean",
            "queue_mean",
            "prefilled_tokens",
        )
    }
    tell(workload.name, f"   real {real}", f"  model {simulation}", f"  apart {apart}")
    return {
        "workload": workload.name, "rows": len(workload.rows), "window": workload.window,
        "server_args": setting.args, "real": real, "simulated": simulation, "apart": apart,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="where the tiny model is, or is to be made")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--only", default="", help="a part of a workload's name")
    args = parser.parse_args()
    found = measure(args.model, args.tokenizer, args.only)
    goal_keys = ("passes", "running_mean", "queue_mean")
    worst = {key: max(abs(run["apart"][key] or 0) for run in found) for key in goal_keys}
    line = (
        f"simulation: over {len(found)} workloads at most {worst['passes']:.1%} off in forward passes, "
        f"{worst['running_mean']:.1%} in mean running, {worst['queue_mean']:.1%} in mean queue "
        f"(goal {GOAL:.0%})"
    )
    goal = {"apart_at_most": GOAL, "met": max(worst.values()) <= GOAL}
    save(
        "simulation",
        line,
        {"goal": goal, "worst": worst, "workloads": found},
        ("batchrunner", "sglang", "torch"),
    )


if __name__ == "__main__":
    main()
