"""Throughput on one GPU: the runner beside plain SGLang and a bare loop, on models of published comparisons.

    python -m benchmarks.card --seconds 420 --tokenizer FOLDER --keep FOLDER

A machine with a GPU may be at hand for some minutes only. Therefore the cases of `PLAN` are in the order of
their importance, and each has the seconds that it is expected to take on an H200. The command measures the
first case that results/card.json lacks and that fits into the remaining time, then the next one. It saves the
results after each run, so the same command continues with the next case when it is run again. Names of cases
as arguments restrict it to these cases.

A case has one server and one set of rows. Each of its runs has a side, the client that sends the rows, and
begins with an empty radix cache:

- `runner`: batchrunner with `window: auto`; `single` is the same with one row in each request
- `loop`: an aiohttp loop with 512 rows in flight
- `once`: all rows at once, in lists of 4,000, which the server splits up as `Engine.generate` does
- `generate`: `Engine.generate` in one process, without a server

The weights are dummies of the published shapes (`--load-format dummy`). They take as much computation as real
weights. Their outputs are noise, so `ignore_eos` and an output length for each row set the lengths. The cases
with texts need real weights, which must be beside the tokenizer.

The logs of the servers, and the readings of the control law, are written to the directory `--keep`. Without a
GPU, a tiny model goes through the same steps in a small size, and nothing is saved.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from batchrunner.core.console import tell
from batchrunner.core.errors import EXIT_DONE, EXIT_INTERRUPTED
from batchrunner.dispatch.concurrency.law import Controller, CornerChange, Decision, Reading
from batchrunner.runner.foreground import run_in_foreground
from batchrunner.runner.trial import logged_passes, output_rate
from batchrunner.sglang.device import card_name, cpu_environment, has_gpu, server_args
from benchmarks.engine import KEY_VARIABLE, Log, Server, flush, job_for, lognormal, serve, work_of
from benchmarks.measure import RESULTS, in_fresh_process, post_all, save, versions
from tests.support.tiny_model import TOKENIZER_FILES, make_tiny_llama

SEED = 17
VOCABULARY = (100, 45_000)
"""Range of the token IDs of prompts."""
CONTEXT = 8192
"""Context length of the servers, in tokens."""
LONGEST = 4000
"""Maximum tokens of a prompt, and of an output."""
LOOP_WINDOW = 512
"""Rows that the side `loop` has in flight."""
MOST_IN_A_LIST = 4000
"""Maximum rows in a request of the side `once`."""
WARM_UP_ROWS = 100
"""Number of rows that are sent before the first run of a case."""
LEAST_RUN_S = 30.0
"""No run begins with fewer seconds left."""
CPU_SCALE = 0.05
"""Length of prompts and outputs without a GPU, relative to those on a GPU."""
CPU_ROWS = 100
"""Maximum rows of a case without a GPU."""
CPU_ARGS: dict[str, Any] = {
    "max-total-tokens": 40_000, "max-running-requests": 16, "context-length": CONTEXT,
    "decode-log-interval": 1,
}  # fmt: skip
"""Flags of servers without a GPU, so that rows wait and passes are logged even in so small a case."""
CPU_STOP_S = 240.0
"""Value of `stop_after_s` without a GPU. A server takes up to a minute to start."""
DOCUMENTS = Path("data/docs.parquet").resolve()
PASS_LINE = re.compile(r"^\[([\d-]+ [\d:]+)[^]]*\] (?:Decode|Prefill) batch.*#queue-req: (\d+)", re.MULTILINE)
"""Time and queue of a forward pass in a server's log."""
WORK_FIGURES = ("prefill_passes", "running_mean", "cached_share", "prefilled_tokens", "retracted")
"""Figures of a server's work (`work_of`) that are saved."""
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "aiohttp", "uvloop", "pyarrow")
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
"""Configurations of the models, by name. Source: the models' config.json; `qwen3-next-small` has the
proportions of Qwen3-Next-80B-A3B with fewer layers and experts. gpt-oss-20b is missing, because its MXFP4
weights have no dummies."""
REAL = "real weights"
"""Model of the cases with texts: the one whose weights are beside the tokenizer. Without weights there, these
cases are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Rows of random token IDs. Lengths are a mean and a standard deviation, in tokens (lognormal)."""

    rows: int
    prompt: tuple[float, float]
    output: tuple[float, float]
    shared: int = 0
    """Tokens of the prefix that the rows of a group share."""
    group: int = 1
    """Rows of a group. The rows of all groups are shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Rows from the documents of data/docs.parquet. Outputs end by themselves."""

    rows: int
    prompt: str
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A server, rows, and the runs that are measured with them."""

    model: str
    rows: Tokens | Texts
    runs: Sequence[str]
    """Side of each run (see above), in the order in which the runs are measured."""
    seconds: float
    """Expected seconds on an H200, start of the server included."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the server."""
    is_launched_by_runner: bool = False
    """Whether the runner starts the server, changes its flags, and starts it again when it dies."""
    stop_after_s: float | None = None
    """Seconds after which the run is stopped as by Ctrl-C; None to run to the end."""


TABLE = Tokens(rows=1500, prompt=(980, 1000), output=(500, 200))
"""Lengths near those of DataTrove's table, which does not publish them: FineWeb-Edu's documents, with outputs
that vary little."""
LONG_JOB = Tokens(rows=4000, prompt=(260, 250), output=(128, 50))
"""So many rows that the end, when no row waits, is a small part of the job."""
QUESTIONS = Tokens(rows=1800, prompt=(60, 0), output=(32, 0), shared=2000, group=30)
"""60 documents with 30 questions each."""
ONE_TOKEN = Tokens(rows=10_000, prompt=(60, 0), output=(1, 0))
RECORD_SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["function", "class", "module", "guide", "other"]},
        "summary": {"type": "string", "maxLength": 200},
        "is_deprecated": {"type": "boolean"},
    },
    "required": ["topic", "kind", "summary", "is_deprecated"],
    "additionalProperties": False,
}
RECORDS = Texts(rows=1500, prompt="Describe this text as JSON:\n\n{{ text }}", schema=RECORD_SCHEMA)
REWRITES = Texts(rows=1500, prompt="Write this text again, without mistakes:\n\n{{ text }}")
SUMMARIES = Texts(rows=1500, prompt="Say in two sentences what this text is about:\n\n{{ text }}")
POOL = {"max-total-tokens": 200_000}
"""A pool for about 600 rows of LONG_JOB."""
LARGE_GRAPHS = {"cuda-graph-max-bs-decode": 2048, "max-running-requests": 2048}
NGRAM = {"speculative-algorithm": "NGRAM", "max-running-requests": 256}
RUNNER = ("runner",)
ALL_CLIENTS = ("runner", "loop", "once")
PLAN = {
    "qwen3-8b": Case(
        model="qwen3-8b", rows=LONG_JOB, runs=(*ALL_CLIENTS, "runner", "loop"), seconds=360, args=POOL
    ),
    "adapt": Case(
        model="qwen3-8b", rows=replace(LONG_JOB, rows=60_000), runs=RUNNER, seconds=350,
        is_launched_by_runner=True, stop_after_s=290,
    ),
    "order": Case(
        model="qwen3-8b", rows=QUESTIONS, runs=ALL_CLIENTS, seconds=210, args={"max-total-tokens": 60_000}
    ),
    "memory-at-start": Case(
        model="qwen3-8b", rows=replace(LONG_JOB, rows=500), runs=RUNNER, seconds=110,
        args={"mem-fraction-static": 0.99}, is_launched_by_runner=True,
    ),
    "memory-in-prefill": Case(
        model="qwen3-8b", rows=Tokens(rows=300, prompt=(6000, 0), output=(32, 0)), runs=RUNNER, seconds=140,
        args={"mem-fraction-static": 0.96, "chunked-prefill-size": 65_536}, is_launched_by_runner=True,
    ),
    "qwen3-8b-table": Case(model="qwen3-8b", rows=TABLE, runs=RUNNER, seconds=190),
    "order-generate": Case(
        model="qwen3-8b", rows=QUESTIONS, runs=("generate",), seconds=180, args={"max-total-tokens": 60_000}
    ),
    "one-token": Case(
        model="smollm2-135m", rows=ONE_TOKEN, runs=("loop", "single", "runner"), seconds=80
    ),
    "one-token-four-fronts": Case(
        model="smollm2-135m", rows=ONE_TOKEN, runs=("loop", "single", "runner"), seconds=80,
        args={"tokenizer-worker-num": 4},
    ),
    "records": Case(model=REAL, rows=RECORDS, runs=RUNNER, seconds=80, args={"max-running-requests": 256}),
    "records-ngram": Case(model=REAL, rows=RECORDS, runs=RUNNER, seconds=80, args=NGRAM),
    "rewrites": Case(model=REAL, rows=REWRITES, runs=RUNNER, seconds=80, args={"max-running-requests": 256}),
    "rewrites-ngram": Case(model=REAL, rows=REWRITES, runs=RUNNER, seconds=80, args=NGRAM),
    "summaries-ngram": Case(model=REAL, rows=SUMMARIES, runs=RUNNER, seconds=80, args=NGRAM),
    "hybrid": Case(model="qwen3-next-small", rows=LONG_JOB, runs=RUNNER, seconds=120),
    "hybrid-adapt": Case(
        model="qwen3-next-small", rows=replace(LONG_JOB, rows=40_000), runs=RUNNER, seconds=250,
        is_launched_by_runner=True, stop_after_s=200,
    ),
    "fp8": Case(
        model="qwen3-8b", rows=LONG_JOB, runs=RUNNER, seconds=110, args={**POOL, "quantization": "fp8"}
    ),
    "mixed-chunk": Case(
        model="qwen3-8b", rows=LONG_JOB, runs=RUNNER, seconds=110, args={**POOL, "enable-mixed-chunk": True}
    ),
    "qwen3-0.6b": Case(model="qwen3-0.6b", rows=replace(TABLE, rows=3000), runs=ALL_CLIENTS, seconds=240),
    "smollm2-1.7b": Case(model="smollm2-1.7b", rows=replace(TABLE, rows=3000), runs=ALL_CLIENTS, seconds=240),
    "smollm2-135m": Case(
        model="smollm2-135m", rows=replace(TABLE, rows=8000), runs=ALL_CLIENTS, seconds=420, args=LARGE_GRAPHS
    ),
    "qwen3-30b-a3b": Case(model="qwen3-30b-a3b", rows=TABLE, runs=RUNNER, seconds=300),
}  # fmt: skip


def write_rows(path: Path, rows: Tokens) -> None:
    """Write the prompts and the output lengths of random rows."""
    random_numbers = random.Random(SEED)

    def random_ids(tokens: int) -> list[int]:
        return random_numbers.choices(range(*VOCABULARY), k=tokens)

    groups = math.ceil(rows.rows / rows.group)
    prefixes = [random_ids(rows.shared) for _ in range(groups)]
    prompts = []
    for row in range(rows.rows):
        length = lognormal(random_numbers, *rows.prompt, longest=LONGEST)
        prompts.append([*prefixes[row // rows.group], *random_ids(length)])
    random_numbers.shuffle(prompts)
    output_lengths = [lognormal(random_numbers, *rows.output, longest=LONGEST) for _ in prompts]
    table = {
        "id": [f"row-{row:05d}" for row in range(rows.rows)],
        "input_ids": pa.array(prompts, pa.list_(pa.int32())),
        "tokens": pa.array(output_lengths, pa.int32()),
    }
    pq.write_table(pa.table(table), path, row_group_size=1000)


def make_shape(folder: Path, model: str, tokenizer: Path) -> Path:
    """Write the directory of a model without weights."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return folder


def rows_of(job_file: str) -> tuple[dict[str, Any], list[list[int]], list[dict[str, Any]]]:
    """Return a job, the prompts of its rows as token IDs, and the sampling parameters of each row."""
    job = json.loads(Path(job_file).read_text())
    rows = pq.read_table(job["input"]["path"]).to_pylist()
    prompts = [row["input_ids"] for row in rows]
    sampling = [{**job["sampling"], "max_new_tokens": row["tokens"]} for row in rows]
    return job, prompts, sampling


def post(job: Mapping[str, Any], bodies: Sequence[Mapping[str, Any]], window: int) -> dict[str, Any]:
    """Post the bodies with `window` requests in flight; return the time and the number of output tokens."""
    url = job["engine"]["urls"][0] + "/generate"
    encoded_bodies = [orjson.dumps(body) for body in bodies]
    wall_s, replies = uvloop.run(post_all(url, encoded_bodies, window, os.environ[KEY_VARIABLE]))
    tokens = 0
    for reply in replies:
        content = orjson.loads(reply)
        # A request with a list of prompts gets a list of answers.
        answers = content if isinstance(content, list) else [content]
        tokens += sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {"wall_s": wall_s, "tokens": tokens, "window": window}


def loop(job_file: str) -> dict[str, Any]:
    """Send one row in each request, with LOOP_WINDOW rows in flight."""
    job, prompts, sampling = rows_of(job_file)
    pairs = zip(prompts, sampling, strict=True)
    bodies = [{"input_ids": ids, "sampling_params": parameters} for ids, parameters in pairs]
    return post(job, bodies, LOOP_WINDOW)


def warm_up(job_file: str) -> dict[str, Any]:
    """Send a few rows with a few output tokens, so that all kernels are compiled."""
    job, prompts, sampling = rows_of(job_file)
    body = {"input_ids": prompts[:WARM_UP_ROWS], "sampling_params": {**sampling[0], "max_new_tokens": 16}}
    return post(job, [body], 1)


def once(job_file: str) -> dict[str, Any]:
    """Send all rows at once, in as few requests as possible."""
    job, prompts, sampling = rows_of(job_file)
    parts = [slice(begin, begin + MOST_IN_A_LIST) for begin in range(0, len(prompts), MOST_IN_A_LIST)]
    bodies = [{"input_ids": prompts[part], "sampling_params": sampling[part]} for part in parts]
    return post(job, bodies, len(bodies)) | {"window": len(prompts)}


def generate(job_file: str) -> dict[str, Any]:
    """Pass all rows to `Engine.generate`. The start of the engine does not count."""
    import sglang  # noqa: PLC0415 - seconds to import

    job, prompts, sampling = rows_of(job_file)
    args = server_args(job["engine"]["args"], cpu=not has_gpu())
    flags = {name.replace("-", "_"): value for name, value in args.items()}
    engine = sglang.Engine(model_path=job["engine"]["model"], **flags)
    engine.generate(input_ids=prompts[:WARM_UP_ROWS], sampling_params={"max_new_tokens": 16})
    engine.flush_cache()
    started_at = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    wall_s = time.perf_counter() - started_at
    engine.shutdown()
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {"wall_s": wall_s, "tokens": tokens, "window": len(prompts)}


@contextmanager
def recorded_readings(path: Path) -> Iterator[None]:
    """Write each reading of the control law in the block to `path`, with the window and the corner after it.

    The controller has no hook for it, so its method is replaced during the block.
    """
    sample = Controller.sample
    readings: list[list[Any]] = []

    def sample_and_record(
        law: Controller, now: float, reading: Reading, *, may_grow: bool = True
    ) -> list[Decision | CornerChange]:
        changes = sample(law, now, reading, may_grow=may_grow)
        readings.append([round(now, 3), *asdict(reading).values(), law.window, law.corner])
        return changes

    Controller.sample = sample_and_record  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Controller.sample = sample  # type: ignore[method-assign]
        path.write_text("".join(json.dumps(reading) + "\n" for reading in readings))


def runner(job_file: str, stop_after_s: float | None = None) -> dict[str, Any]:
    """Run the job with batchrunner, at most for `stop_after_s` seconds."""
    if stop_after_s is not None:
        timer = threading.Timer(stop_after_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
    with recorded_readings(Path(job_file).with_suffix(".readings")):
        report = run_in_foreground(job_file, [], fresh=True, retry_failed=False, quiet=True, as_json=False)
    if report.exit_code not in {EXIT_DONE, EXIT_INTERRUPTED}:
        raise SystemExit("\n".join(report.lines()))
    return {
        "wall_s": report.wall_s,
        "tokens": report.output_tokens,
        "rows_ok": report.rows_ok,
        "window": report.window,
        "load": report.load,
        "incidents": report.incidents,
    }


OTHER_SIDES: dict[str, Callable[[str], dict[str, Any]]] = {
    "warm-up": warm_up, "once": once, "loop": loop, "generate": generate,
}  # fmt: skip
"""The sides that are not batchrunner."""


def steady_rate(log: str) -> float | None:
    """Return output tokens per second while requests waited; None if the log has too few decode passes."""
    passes = logged_passes(log.splitlines())
    passes_with_queue = [index for index, (_, batch) in enumerate(passes) if batch.queue]
    return output_rate(passes[: passes_with_queue[-1] + 1]) if passes_with_queue else None


def share_of_end(log: str) -> float | None:
    """Return the fraction of the logged time after the last request had waited; None if none waited."""
    passes = [(datetime.fromisoformat(text), int(queue)) for text, queue in PASS_LINE.findall(log)]
    times_with_queue = [logged_at for logged_at, queue in passes if queue]
    if not times_with_queue:
        return None
    (first, _), (last, _) = passes[0], passes[-1]
    return None if last == first else round((last - times_with_queue[-1]) / (last - first), 3)


def figures_of_log(log: str) -> dict[str, Any]:
    """Return figures of a run from the server's log.

    The log has a line for each prefill pass, and for each 40th decode pass.
    """
    work = work_of(log)
    return {
        "steady_tokens_per_s": steady_rate(log),
        "share_of_end": share_of_end(log),
        "work": {name: work[name] for name in WORK_FIGURES},
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs the sides of one case."""

    folder: Path
    case: Case
    model: Path
    args: Mapping[str, Any]
    deadline: float
    """Time at which a run is killed, in seconds of the monotonic clock."""

    @property
    def run_path(self) -> Path:
        """Output path of the runner."""
        return self.folder / "run"

    def job(self, side: str, server: Server | None) -> dict[str, Any]:
        """Return the job of a run. Without a server, the runner starts one."""
        rows = self.case.rows
        job = job_for(self.folder / "rows.parquet", self.run_path, server.url if server else "")
        # Random output tokens may decode to nothing, which fails the row.
        job["limits"] = {"max_failed_rows": "5%"}
        job["sampling"]["skip_special_tokens"] = False
        if isinstance(rows, Texts):
            job["input"] = {"path": str(DOCUMENTS), "limit": rows.rows}
            job["prompt"] = {"user": rows.prompt}
            job["sampling"] = {"max_new_tokens": 512, "temperature": 0}
            if rows.schema:
                job["sampling"]["json_schema"] = rows.schema
        if side == "single":
            job["bundle"] = "off"
        if server is None:
            job["engine"] = {"kind": "server", "model": str(self.model), "args": self.args}
        return job

    def measure(self, side: str, number: int, server: Server | None) -> dict[str, Any]:
        """Measure a run in a process of its own; return its figures, or why it failed."""
        file = self.folder / f"{number}-{side}.json"
        file.write_text(json.dumps(self.job(side, server)))
        arguments = ["--side", side, "--job", str(file)]
        if self.case.stop_after_s is not None:
            arguments += ["--stop-after", str(self.case.stop_after_s)]
        log = None
        if server is not None:
            flush(server)
            log = Log(server.log)
        try:
            figures = in_fresh_process(
                "benchmarks.card", *arguments, timeout_s=self.deadline - time.monotonic()
            )
        except (SystemExit, subprocess.TimeoutExpired) as failure:
            return {"side": side, "failed": str(failure)[-2000:]}
        figures = {"side": side, **figures, "tokens_per_s": round(figures["tokens"] / figures["wall_s"], 1)}
        if log is not None:
            return figures | figures_of_log(log.text())
        if self.case.is_launched_by_runner:
            figures["by_start"] = self._by_start()
        return figures

    def _by_start(self) -> list[dict[str, Any]]:
        """Return the figures of each start of the server that the runner launched."""
        logs = sorted(self.run_path.glob("engine-server*.log"))
        text = "".join(log.read_text(errors="replace") for log in logs)
        starts = re.split(r"^(?=.*server_args=)", text, flags=re.MULTILINE)[1:]
        return [figures_of_log(start) for start in starts]


def is_measured(record: Mapping[str, Any] | None, case: Case) -> bool:
    """Tell whether a saved record has all runs of the case as it is now, or the reason why it failed."""
    if record is None or record.get("case") != definition(case):
        return False
    return "failed" in record or len(record["runs"]) == len(case.runs)


def definition(case: Case) -> dict[str, Any]:
    """Return a case as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(case)))
    return plain


@dataclass(slots=True)
class Session:
    """Measures cases until the time is up."""

    keep: Path
    tokenizer: Path
    deadline: float
    """Time at which the session ends, in seconds of the monotonic clock."""
    machine_args: Mapping[str, Any]
    """Flags that servers need on this machine."""
    cases: dict[str, Any]
    """Record of each measured case, by its name."""

    def next_case(self, names: Sequence[str]) -> str | None:
        """Return the first case that is not measured yet and fits into the remaining time."""
        remaining_s = self.deadline - time.monotonic()
        for name in names:
            case = PLAN[name]
            if case.model == REAL and not any(self.tokenizer.glob("*.safetensors")):
                continue
            needed_s = case.seconds if has_gpu() else LEAST_RUN_S
            if not is_measured(self.cases.get(name), case) and needed_s <= remaining_s:
                return name
        return None

    def measure(self, name: str) -> None:
        """Measure the runs of a case, as far as the time allows."""
        case = PLAN[name]
        folder = self.keep / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        args = {"context-length": CONTEXT, **self.machine_args, **case.args}
        if case.model == REAL:
            model = self.tokenizer
        else:
            model = self._make_model(folder / "model", case.model)
            args = {"load-format": "dummy", **args}
        run_case = case
        if not has_gpu():
            run_case = scaled_to_cpu(case)
            args = CPU_ARGS
        if isinstance(run_case.rows, Tokens):
            write_rows(folder / "rows.parquet", run_case.rows)
        record = self.cases[name] = {
            "case": definition(case), "args": args, "card": card_name(), "versions": versions(*PACKAGES),
            "date": time.strftime("%F"), "runs": [],
        }  # fmt: skip
        bench = Bench(folder=folder, case=run_case, model=model, args=args, deadline=self.deadline)
        if run_case.is_launched_by_runner or "generate" in run_case.runs:
            self._measure_runs(name, bench, server=None)
            return
        started_at = time.monotonic()
        with serve(model, folder, args) as server:
            record["start_s"] = round(time.monotonic() - started_at, 1)
            if isinstance(run_case.rows, Tokens):
                bench.measure("warm-up", 0, server)
            self._measure_runs(name, bench, server)

    def _measure_runs(self, name: str, bench: Bench, server: Server | None) -> None:
        """Measure the runs of a case one after the other, and save the results after each."""
        for number, side in enumerate(bench.case.runs, start=1):
            if time.monotonic() + LEAST_RUN_S > self.deadline:
                tell(f"{name} {side}: no time")
                return
            figures = bench.measure(side, number, server)
            self.cases[name]["runs"].append(figures)
            self._save(f"{name} {side}: {summary(figures)}")

    def record_failure(self, name: str, why: str) -> None:
        """Save why a case ended, so that the next command does not begin with it again."""
        record = self.cases.setdefault(name, {"case": definition(PLAN[name]), "runs": []})
        record["failed"] = why[-2000:]
        self._save(f"{name}: failed: {why}")

    def _make_model(self, folder: Path, name: str) -> Path:
        """Write a model of this name without weights; without a GPU, write a tiny model instead."""
        if has_gpu():
            return make_shape(folder, name, self.tokenizer)
        return make_tiny_llama(folder, self.tokenizer)

    def _save(self, line: str) -> None:
        if has_gpu():
            save("card", line, {"cases": self.cases}, ())
        else:
            tell(line)


def summary(figures: Mapping[str, Any]) -> str:
    """Return the most important figures of a run in one line."""
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    starts = figures.get("by_start", [figures])
    steady = ", then ".join(str(start.get("steady_tokens_per_s")) for start in starts)
    return f"{figures['tokens_per_s']} tokens/s, {steady} in steady state"


def scaled_to_cpu(case: Case) -> Case:
    """Return a case that a CPU can do: fewer rows, shorter texts, an earlier stop."""
    rows = case.rows
    if isinstance(rows, Tokens):
        mean_prompt, mean_output = (max(1.0, mean * CPU_SCALE) for mean, _ in (rows.prompt, rows.output))
        rows = replace(
            rows,
            rows=min(rows.rows, CPU_ROWS),
            prompt=(mean_prompt, rows.prompt[1] * CPU_SCALE),
            output=(mean_output, rows.output[1] * CPU_SCALE),
            shared=round(rows.shared * CPU_SCALE),
        )
    else:
        rows = replace(rows, rows=min(rows.rows, 8))
    stop_after_s = None if case.stop_after_s is None else CPU_STOP_S
    return replace(case, rows=rows, stop_after_s=stop_after_s)


def main() -> None:
    """Measure the cases that fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(PLAN)}; all by default")
    parser.add_argument("--seconds", type=float, default=3600, help="for all cases together")
    parser.add_argument("--args", type=json.loads, default={}, help="flags that this machine needs, as JSON")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--keep", type=Path, default=Path("out/card"), help="logs and readings")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.cases} - {*PLAN}:
        parser.error(f"no such case: {', '.join(unknown)}")
    if options.side in OTHER_SIDES:
        print(json.dumps(OTHER_SIDES[options.side](options.job)))
        return
    if options.side:
        print(json.dumps(runner(options.job, options.stop_after)))
        return
    if not has_gpu():
        if not options.cases:
            tell("skipped: no GPU (named cases go through their steps with a tiny model)")
            return
        os.environ.update(cpu_environment(dict(os.environ)))
    saved = RESULTS / "card.json"
    session = Session(
        keep=options.keep.resolve(),
        tokenizer=options.tokenizer.resolve(),
        deadline=time.monotonic() + options.seconds,
        machine_args=options.args,
        cases=json.loads(saved.read_text())["cases"] if has_gpu() and saved.is_file() else {},
    )
    names = [name for name in PLAN if not options.cases or name in options.cases]
    while name := session.next_case(names):
        names.remove(name)
        try:
            session.measure(name)
        except (SystemExit, OSError, subprocess.SubprocessError) as failure:
            session.record_failure(name, str(failure))


if __name__ == "__main__":
    main()
