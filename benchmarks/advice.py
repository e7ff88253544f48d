"""Does following `batchrun advise` raise throughput? SGLang on the CPU, a tiny random model.

Each case is a job with one wrong setting, on purpose. It runs; `advise` is asked about its run directory;
what it says is put into the job; the job runs again, and both again in alternating pairs (`--pairs`). Two
cases are the other way round: what the guides say and `advise` does not. Every run starts its own server.
Output tokens a second are noisy on a shared machine; tokens a forward pass are the scheduler's own count.

With `--flags`, the cases of benchmarks/advice_flags.py instead: is a bad value of each flag seen?
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.advise.advise import advise
from benchmarks.advice_flags import ARGS, LOG_INTERVAL, SEED, STOPS, VOCABULARY, measure_flags
from benchmarks.measure import RESULTS, interval, save
from tests.support.tiny_model import make_tiny_llama


@dataclass(frozen=True, slots=True)
class Case:
    """A job with one mistake, and the rule that is to find it."""

    rule: str
    rows: int
    prompt: int
    """Tokens."""
    sampling: dict[str, Any]
    args: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    and_also: str = ""
    """A second rule that is to find it, whose advice is followed at once."""
    unsaid: dict[str, Any] = field(default_factory=dict)
    """Flags that the guides have for this sign and `advise` has not: is it right?"""


CASES = {
    "a window of 8": Case(
        "queue-empty", 1500, 24, {"max_new_tokens": 60, "ignore_eos": True}, job={"window": 8}
    ),
    "max-running-requests 8": Case(
        "running-capped", 1500, 24, {"max_new_tokens": 60, "ignore_eos": True}, {"max-running-requests": 8}
    ),
    "max_new_tokens 2000, outputs of some 50, conservativeness 3": Case(
        "conservative", 2000, 24, {"max_new_tokens": 2000, "stop_token_ids": STOPS, "temperature": 1.0},
        {"schedule-conservativeness": 3},
    ),
    "chunked-prefill-size 64, prompts of 60": Case(
        "prefill-full", 1200, 60, {"max_new_tokens": 20, "ignore_eos": True}, {"chunked-prefill-size": 64}
    ),
    "chunked-prefill-size 64 and max-running-requests 8, prompts of 60": Case(
        "prefill-full", 800, 60, {"max_new_tokens": 20, "ignore_eos": True},
        {"chunked-prefill-size": 64, "max-running-requests": 8}, and_also="running-capped",
    ),
    "a pool of 8,000 tokens, outputs of 1,000: left alone": Case(
        "retractions", 90, 24, {"max_new_tokens": 1000}, {"max-total-tokens": 8000},
        unsaid={"schedule-conservativeness": 1.3},
    ),
    "conservativeness 0.1, outputs of 400: left alone": Case(
        "retractions", 150, 200, {"max_new_tokens": 400},
        {"max-total-tokens": 8000, "schedule-conservativeness": 0.1},
        unsaid={"schedule-conservativeness": 1.3},
    ),
}  # fmt: skip


def make_job(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    made = random.Random(SEED)
    ids = [[made.randrange(100, VOCABULARY) for _ in range(case.prompt)] for _ in range(case.rows)]
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}), folder / "input.parquet")
    return {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": {"temperature": 0, **case.sampling},
        "output": {"path": str(folder / "run")},
        "engine": {
            "kind": "server", "model": str(model), "device": "cpu", "args": {**ARGS, **case.args},
            "env": {"OMP_NUM_THREADS": "1"},
        },
        **case.job,
    }  # fmt: skip


def followed(job: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Put an advice into a job: server flags, or the window."""
    args = {name: value for name, value in {**job["engine"]["args"], **flags}.items() if value is not None}
    changed = {**job, "engine": {**job["engine"], "args": args}}
    return changed if flags else {**changed, "window": "auto"}


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job afresh; return its rates and its engine's counts."""
    run = Path(job["output"]["path"])
    shutil.rmtree(run, ignore_errors=True)
    report = batchrunner.run(job)
    log = (run / "engine-server.log").read_text(errors="replace")
    decode, prefill = len(re.findall("Decode batch", log)), len(re.findall("Prefill batch", log))
    return {
        "tokens_per_s": report.output_tokens_per_s,
        "tokens_per_pass": round(report.output_tokens / (decode * LOG_INTERVAL + prefill), 2),
        "retractions": len(re.findall("Retract requests", log)),
        "wall_s": report.wall_s,
    }


def measure(name: str, model: Path, folder: Path, pairs: int) -> dict[str, Any]:
    case = CASES[name]
    wrong = make_job(case, model, folder)
    first = measured(wrong)
    judgement = advise(wrong["output"]["path"])
    print("\n".join([name, *judgement.lines()]), file=sys.stderr, flush=True)
    shutil.copy(Path(wrong["output"]["path"]) / "engine-server.log", folder / "engine-server.log")
    found = [advice for advice in judgement.advice if advice.rule == case.rule]
    if not found or bool(found[0].change) == bool(case.unsaid):
        raise SystemExit(f"{name}: not what advise says of {case.rule}")
    advice = found[0]
    beside = {
        flag: value
        for other in judgement.advice
        if other.rule == case.and_also
        for flag, value in other.args.items()
    }
    if case.and_also and not beside:
        raise SystemExit(f"{name}: {case.and_also} is not said")
    right = followed(wrong, case.unsaid or {**advice.args, **beside})
    turns = [{"before": first, "after": measured(right)}]
    turns += [{"after": measured(right), "before": measured(wrong)} for _ in range(pairs - 1)]
    print(json.dumps(turns), file=sys.stderr, flush=True)
    return {"rule": case.rule, "advice": advice.as_dict(), "pairs": turns}


def gain(found: dict[str, Any]) -> dict[str, Any]:
    """Compare after with before."""
    return {
        figure: interval([turn["after"][figure] / turn["before"][figure] for turn in found["pairs"]])
        for figure in ("tokens_per_s", "tokens_per_pass")
    }


def _measured_before() -> dict[str, Any]:
    """Return the cases of the last results: those that are not measured now are kept."""
    path = RESULTS / "advice.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def _median(case: dict[str, Any]) -> float:
    gained = case["gain"]["tokens_per_s"]
    return float(gained["median"] if isinstance(gained, dict) else gained.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="some of them, by their rules; all by default")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument(
        "--flags", action="store_true", help="the cases of single flags; CASES are flags then"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where to leave the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-advice-") as scratch:
        folder = options.keep or Path(scratch)
        model = make_tiny_llama(folder / "tiny", options.tokenizer, vocabulary=VOCABULARY)
        if options.flags:
            measure_flags(model, folder, options.cases)
            return
        found = {
            name: measure(name, model, folder / str(number), options.pairs)
            for number, (name, case) in enumerate(CASES.items())
            if not options.cases or case.rule in options.cases
        }
    for case in found.values():
        case["gain"] = gain(case)
        case["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    found = {**_measured_before(), **found}
    told = [f"{name}: {_median(case):.2f} times" for name, case in found.items()]
    save("advice", f"output tokens/s after advice: {'; '.join(told)}", {"cases": found}, ("sglang", "torch"))


if __name__ == "__main__":
    main()
