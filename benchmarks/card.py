"""What one GPU gives: the runner beside plain SGLang and a bare loop, on models that people compare by.

    python -m benchmarks.card qwen3-8b fp8 --tokenizer FOLDER --keep FOLDER --seconds 500

A case of `PLAN` starts one server and measures its sides one after the other on the same rows, the radix
cache flushed before each:

- `once`: all rows in lists, which the server splits up as `Engine.generate` does;
- `loop`: an aiohttp loop with 512 rows in flight;
- `runner`: the runner, `window: auto`; `single` the same with one row in a request;
- `launched`: the runner starts the server itself, and keeps it alive where its flags kill it;
- `generate`: `Engine.generate` in one process, without a server.

The weights are dummies of the published shapes (`--load-format dummy`): they compute what real ones do, and
`ignore_eos` with each row's own length makes up for the noise that they write. `results/card.json` is written
after each side, so that a machine that is there for minutes can do case by case; `--keep` has the servers'
logs and what the control law read (`test_the_gauges_of_a_card` plays one back). Without a GPU a tiny model
goes through the steps of the cases that are named, and nothing is saved.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from batchrunner.core.console import tell
from batchrunner.dispatch.concurrency.law import Controller, CornerChange, Decision, Reading
from batchrunner.sglang.device import card_name, cpu_environment, has_gpu, server_args
from benchmarks.engine import (
    KEY_VARIABLE,
    Log,
    Server,
    flush,
    job_for,
    lognormal,
    runner,
    serve,
    work_of,
)  # fmt: skip
from benchmarks.measure import RESULTS, in_fresh_process, post_all, save, versions
from tests.support.tiny_model import TOKENIZER_FILES, make_tiny_llama

SEED = 17
VOCABULARY = (100, 45_000)
"""From which prompts are drawn."""
CONTEXT, LONGEST = 8192, 4000
"""Tokens of a row, and of a prompt and of an output at most."""
DOCUMENTS, TUTORIALS = (1030, 1000), (500, 200)
"""Mean and standard deviation of the tokens of a prompt and of an output. DataTrove does not publish those of
its table; these are near FineWeb-Edu's documents, with outputs that vary little, so that a job of a minute
has no long tail."""
STOPS = 253
"""Mean tokens of an output of the workload `free`, which ends by itself, of 4,000 that it may have."""
DOCS = Path("data/docs.parquet").resolve()
LOOP = 512
MOST_IN_A_LIST = 4000
WARM = 100
"""Rows that warm a server up."""
LEAST_S = 45.0
"""Seconds that must be left for a side to be begun."""
WORK = ("prefill_passes", "running_mean", "cached_share", "prefilled_tokens", "retracted")
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "aiohttp", "uvloop", "pyarrow")

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
"""Source: the models' config.json. gpt-oss-20b is not there: its MXFP4 weights have no dummies."""
TABLE = ("documents/runner", "documents/loop", "documents/once")
ONE = ("one/loop", "one/single", "one/runner")


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    rows: int = 0
    """Documents."""
    sides: Sequence[str] = TABLE
    """`WORKLOAD/SIDE`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


REAL = "the tokenizer's"
"""Model whose weights lie beside the tokenizer: outputs that copy their inputs need real ones."""
GRAPHS = {"cuda-graph-max-bs-decode": 2048, "max-running-requests": 2048}
RUNNER = ("documents/runner",)
PLAN = {
    "smollm2-135m": Case("smollm2-135m", 6000),
    "graphs": Case("smollm2-135m", 4000, (*TABLE, *ONE), GRAPHS),
    "qwen3-0.6b": Case("qwen3-0.6b", 2000),
    "qwen3-4b": Case("qwen3-4b", 1500),
    "qwen3-8b": Case("qwen3-8b", 700),
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", 800),
    "generate": Case("smollm2-135m", 4000, ("documents/generate",), GRAPHS),
    "front": Case("smollm2-135m", 0, ONE, {"tokenizer-worker-num": 4}),
    "memory": Case("qwen3-8b", 200, ("documents/launched",), {"mem-fraction-static": 0.985}),
    "order": Case("qwen3-8b", 0, ("prefixes/once", "prefixes/loop", "prefixes/runner")),
    "free": Case("qwen3-8b", 700, ("free/once", "free/runner")),
    "clip": Case("qwen3-8b", 700, ("free/runner",), env={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "512"}),
    "fp8": Case("qwen3-8b", 700, RUNNER, {"quantization": "fp8"}),
    "mixed": Case("qwen3-8b", 700, RUNNER, {"enable-mixed-chunk": True}),
    "plain": Case(REAL, 0, ("rewrite/runner",), {"max-running-requests": 256}),
    "ngram": Case(
        REAL, 0, ("rewrite/runner",), {"max-running-requests": 256, "speculative-algorithm": "NGRAM"}
    ),
    "interval": Case("smollm2-135m", 4000, RUNNER, {**GRAPHS, "prefill-decode-interval": 8}),
}


def write_inputs(folder: Path, case: Case, scale: float) -> None:
    """Write a Parquet file of prompts and output lengths for each workload of a case."""
    made = random.Random(SEED)

    def ids(tokens: int) -> list[int]:
        return made.choices(range(*VOCABULARY), k=tokens)

    def long(mean: float, deviation: float) -> int:
        return lognormal(made, mean * scale, deviation * scale, longest=LONGEST)

    for workload in sorted({side.partition("/")[0] for side in case.sides} - {"rewrite"}):
        if workload in {"documents", "free"}:
            prompts = [ids(long(*DOCUMENTS)) for _ in range(case.rows)]
            tokens = [long(*TUTORIALS) for _ in prompts]
        elif workload == "one":
            prompts = [ids(60) for _ in range(10_000 if scale == 1 else 200)]
            tokens = [1] * len(prompts)
        else:  # 60 documents, eight questions on each, in any order
            documents = [ids(round(1500 * scale)) for _ in range(60)]
            prompts = [[*document, *ids(60)] for document in documents for _ in range(8)]
            made.shuffle(prompts)
            tokens = [64] * len(prompts)
        table = {
            "id": [f"row-{i:05d}" for i in range(len(prompts))],
            "input_ids": pa.array(prompts, pa.list_(pa.int32())),
            "tokens": pa.array(tokens, pa.int32()),
        }
        pq.write_table(pa.table(table), folder / f"{workload}.parquet", row_group_size=1000)


def make_shape(folder: Path, model: str, tokenizer: Path) -> Path:
    """Write a model's folder without weights."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return folder


def rows_of(job_file: str) -> tuple[dict[str, Any], list[list[int]], list[dict[str, Any]]]:
    """Return a job, the prompts of its rows, and the sampling parameters of each."""
    job = json.loads(Path(job_file).read_text())
    rows = pq.read_table(job["input"]["path"]).to_pylist()
    own = [{"max_new_tokens": row["tokens"]} if job["sampling"].get("ignore_eos") else {} for row in rows]
    return job, [row["input_ids"] for row in rows], [{**job["sampling"], **parameters} for parameters in own]


def posted(job: Mapping[str, Any], bodies: Sequence[Mapping[str, Any]], window: int) -> dict[str, Any]:
    """Post the bodies as an aiohttp loop does; return the time, and the tokens that came."""
    url = job["engine"]["urls"][0] + "/generate"
    encoded = [orjson.dumps(body) for body in bodies]
    wall_s, answers = uvloop.run(post_all(url, encoded, window, os.environ[KEY_VARIABLE]))
    given = [orjson.loads(answer) for answer in answers]
    each = [answer for one in given for answer in (one if isinstance(one, list) else [one])]
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in each)
    return {"wall_s": wall_s, "tokens": tokens, "window": window}


def loop(job_file: str, *, warm: bool = False) -> dict[str, Any]:
    """Run the loop; `warm`: on a few rows of few tokens, to have every kernel compiled."""
    job, prompts, sampling = rows_of(job_file)
    if warm:
        prompts, sampling = prompts[:WARM], [{**sampling[0], "max_new_tokens": 16}] * len(prompts[:WARM])
    pairs = zip(prompts, sampling, strict=True)
    return posted(job, [{"input_ids": ids, "sampling_params": own} for ids, own in pairs], LOOP)


def once(job_file: str) -> dict[str, Any]:
    """Send all rows at once, in as few requests as there can be."""
    job, prompts, sampling = rows_of(job_file)
    parts = [slice(at, at + MOST_IN_A_LIST) for at in range(0, len(prompts), MOST_IN_A_LIST)]
    bodies = [{"input_ids": prompts[part], "sampling_params": sampling[part]} for part in parts]
    return posted(job, bodies, len(bodies)) | {"window": len(prompts)}


def generate(job_file: str) -> dict[str, Any]:
    """Give all rows to `Engine.generate`; its start does not count."""
    import sglang  # noqa: PLC0415 - seconds to import

    job, prompts, sampling = rows_of(job_file)
    args = server_args(job["engine"]["args"], cpu=not has_gpu())
    flags = {name.replace("-", "_"): value for name, value in args.items()}
    engine = sglang.Engine(model_path=job["engine"]["model"], **flags)
    engine.generate(input_ids=prompts[:WARM], sampling_params={"max_new_tokens": 16})
    engine.flush_cache()
    began = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    wall_s = time.perf_counter() - began
    engine.shutdown()
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {"wall_s": wall_s, "tokens": tokens, "window": len(prompts)}


def recorded(job_file: str) -> dict[str, Any]:
    """Run the job, and keep what the control law reads, its window, and the corner that it sees."""
    sample, readings = Controller.sample, []

    def kept(
        law: Controller, now: float, seen: Reading, *, may_grow: bool = True
    ) -> list[Decision | CornerChange]:
        changes = sample(law, now, seen, may_grow=may_grow)
        readings.append([round(now, 3), *asdict(seen).values(), law.window, law.corner])
        return changes

    Controller.sample = kept  # type: ignore[assignment, method-assign]
    found = runner(job_file)
    Path(job_file).with_suffix(".readings").write_text("\n".join(map(json.dumps, readings)) + "\n")
    return found


SIDES: dict[str, Callable[[str], dict[str, Any]]] = {
    "warm": partial(loop, warm=True), "once": once, "loop": loop, "runner": recorded, "single": recorded,
    "launched": runner, "generate": generate,
}  # fmt: skip


def sustained(log: str) -> float | None:
    """Return output tokens a second while requests waited: the median of the decode lines."""
    found = re.findall(r"Decode batch.*?gen throughput \(token/s\): ([\d.]+), #queue-req: [1-9]", log)
    return round(statistics.median(map(float, found)), 1) if found else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case is measured: its files, its server unless a side starts one, and that one's flags."""

    folder: Path
    server: Server | None
    model: Path
    args: Mapping[str, Any]

    def job(self, workload: str, kind: str) -> dict[str, Any]:
        url = self.server.url if self.server else ""
        job = job_for(self.folder / f"{workload}.parquet", self.folder / "run", url)
        job["limits"] = {"max_failed_rows": "5%"}  # noise may decode to nothing
        if workload == "free":
            config = json.loads((self.model / "config.json").read_text())
            stops = [*range(50, config["vocab_size"], STOPS)]
            job["sampling"] = {"max_new_tokens": LONGEST, "temperature": 1.0, "stop_token_ids": stops}
        job["sampling"]["skip_special_tokens"] = False
        if workload == "rewrite":
            job["input"] = {"path": str(DOCS), "limit": 2000 if has_gpu() else 8}
            job["prompt"] = {"user": "Write this text again, without mistakes:\n\n{{ text }}"}
            job["sampling"] = {"max_new_tokens": 512, "temperature": 0}
        if kind == "single":
            job["bundle"] = "off"
        if self.server is None:
            job["engine"] = {"kind": "server", "model": str(self.model), "args": self.args}
        return job

    def measure(self, side: str, until: float) -> dict[str, Any]:
        """Measure a side, or say how it failed; it is killed at the time `until`."""
        workload, _, kind = side.partition("/")
        file = self.folder / f"{workload}-{kind}.json"
        file.write_text(json.dumps(self.job(workload, kind)))
        log = None
        if self.server:
            flush(self.server)
            log = Log(self.server.log)
        try:
            found = in_fresh_process(
                "benchmarks.card", "--side", kind, "--job", str(file), timeout_s=until - time.monotonic()
            )
        except (SystemExit, subprocess.TimeoutExpired) as failure:
            return {"failed": str(failure)[-2000:]}
        found["tokens_per_s"] = round(found["tokens"] / found["wall_s"], 1)
        if log:
            work = work_of(log.text())  # a line for each prefill pass, and for 40 decode passes
            found["work"] = {name: work[name] for name in WORK}
            found["sustained"] = sustained(log.text())
        return found


@dataclass
class Lab:
    keep: Path
    tokenizer: Path
    until: float
    given: Mapping[str, Any]
    """Flags that this machine needs."""
    found: dict[str, Any]

    def measure(self, name: str) -> None:
        """Measure the sides of a case, as far as there is time."""
        if not self.has_time(name):
            return
        case, gpu = PLAN[name], has_gpu()
        folder = self.keep / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        args = {"load-format": "dummy", "context-length": CONTEXT, **self.given, **case.args}
        if case.model == REAL:
            model = self.tokenizer
            args.pop("load-format")
        elif gpu:
            model = make_shape(folder / "model", case.model, self.tokenizer)
        else:
            model = make_tiny_llama(folder / "model", self.tokenizer)
            args = {"max-total-tokens": 40_000, "context-length": CONTEXT}
            case = replace(case, model="smollm2-135m", rows=min(case.rows, 100))
        write_inputs(folder, case, 1.0 if gpu else 0.05)
        record: dict[str, Any] = {"model": case.model, "args": args, "env": case.env, "rows": case.rows}
        record |= {"card": card_name(), "versions": versions(*PACKAGES), "date": time.strftime("%F")}
        record["sides"] = {}
        with ExitStack() as stack:
            os.environ.update(case.env)
            stack.callback(lambda: [os.environ.pop(variable) for variable in case.env])
            began, server = time.monotonic(), None
            if not case.sides[0].endswith(("launched", "generate")):
                server = stack.enter_context(serve(model, folder, args))
                record["start_s"] = round(time.monotonic() - began, 1)
            place = Place(folder, server, model, args)
            if server and case.model != REAL:
                place.measure(case.sides[0].partition("/")[0] + "/warm", self.until)
            for side in case.sides:
                if not self.has_time(f"{name} {side}"):
                    return
                got = place.measure(side, self.until)
                record["sides"][side] = got
                self.found[name] = record
                rates = f"{got.get('tokens_per_s', got)} tok/s, {got.get('sustained')} sustained"
                self.save(f"{name} {side}: {rates}")

    def has_time(self, what: str) -> bool:
        enough = time.monotonic() + LEAST_S < self.until
        if not enough:
            tell(f"{what}: no time")
        return enough

    def save(self, line: str) -> None:
        if has_gpu():
            save("card", line, {"cases": self.found}, ())
        else:
            tell(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], help=f"of {', '.join(PLAN)}; all by default")
    parser.add_argument("--seconds", type=float, default=3600, help="for all; no side begins in the last 45")
    parser.add_argument("--args", type=json.loads, default={}, help="flags that this machine needs, as JSON")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--keep", type=Path, default=Path("out/card"), help="logs and traces")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.cases} - {*PLAN}:
        parser.error(f"no such case: {', '.join(unknown)}")
    if options.side:
        print(json.dumps(SIDES[options.side](options.job)))
        return
    if not has_gpu():
        if not options.cases:
            tell("skipped: no GPU (named cases go through their steps with a tiny model)")
            return
        os.environ.update(cpu_environment(dict(os.environ)))
    saved = RESULTS / "card.json"
    before = json.loads(saved.read_text())["cases"] if has_gpu() and saved.is_file() else {}
    until = time.monotonic() + options.seconds
    lab = Lab(options.keep.resolve(), options.tokenizer.resolve(), until, options.args, before)
    for name in options.cases or PLAN:
        try:
            lab.measure(name)
        except (SystemExit, OSError, subprocess.SubprocessError) as failure:
            tell(f"{name}: {failure}")


if __name__ == "__main__":
    main()
