"""One case for each flag of tune's space that acts on a CPU: does `batchrun advise` see a bad value of it?

Each case is a job that suffers from one bad value. It runs; `advise` is asked; its first advice is followed,
and the job runs again. Where that names another flag, the value that is known to be right is tried instead:
what it gains is what was missed. Passes and prefilled tokens are the scheduler's own counts, free of noise;
seconds are not compared.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.advise.advise import advise
from batchrunner.engines.logs.series import GUIDES
from benchmarks.measure import RESULTS, save
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from batchrunner.advise.rules import Advice

SEED = 5
VOCABULARY = 2048
"""Tokens of the model. With tens of thousands, sampling costs this machine more than a forward pass does, and
a batch of 40 is as slow a row as one of 10."""
STOPS = [*range(100, VOCABULARY, 50)]
"""One token in 50 ends an output."""
LOG_INTERVAL = 10
"""Decode steps a line: enough lines for a run of seconds."""
ARGS: dict[str, Any] = {
    "max-total-tokens": 20_000, "max-running-requests": 128, "decode-log-interval": LOG_INTERVAL,
    "skip-server-warmup": True,  # its words are not among the model's few
}  # fmt: skip
WORTH = 1.1
"""Gain from which a flag that `advise` does not name is missed."""
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"


@dataclass(frozen=True, slots=True)
class FlagCase:
    """A job with a bad value of one flag."""

    flag: str
    bad: dict[str, Any]
    """Flags of the server beside ARGS."""
    known: dict[str, Any]
    """What is known to be right; None removes a flag."""
    rows: int = 600
    prompt: tuple[int, int] = (24, 24)
    """Fewest and most tokens of a prompt beside its prefix."""
    prefix: int = 0
    """Tokens of the prefix that GROUP rows share."""
    outputs: tuple[int, int] = (60, 60)
    """Fewest and most output tokens of a row, where `asked` is 0."""
    asked: int = 0
    """`max_new_tokens` of outputs of some 50 tokens, which end by themselves."""
    measure: str = "tokens_per_pass"
    """What the flag is to raise: output tokens a pass, or `prompt_tokens_per_computed`."""
    rounds: int = 1
    """How many times in a row the advice is followed."""


GROUP = 8
CASES = {
    "conservativeness 3, max_new_tokens 2000, outputs of some 50": FlagCase(
        "schedule-conservativeness", {"schedule-conservativeness": 3}, {"schedule-conservativeness": 0.3},
        asked=2000,
    ),
    "max_new_tokens 4000 in a pool of 8,000, outputs of some 50": FlagCase(
        CLIP, {"max-total-tokens": 8000, "schedule-conservativeness": 0.3}, {CLIP: 200}, asked=4000, rows=300,
    ),
    "a pool of 2,000 tokens": FlagCase(
        "max-total-tokens", {"max-total-tokens": 2000}, {"max-total-tokens": 20_000}
    ),
    "max-running-requests 8": FlagCase(
        "max-running-requests", {"max-running-requests": 8}, {"max-running-requests": 128}, rows=400
    ),
    "chunks of 64 tokens, prompts of 60": FlagCase(
        "chunked-prefill-size", {"chunked-prefill-size": 64}, {"chunked-prefill-size": 2048},
        prompt=(60, 60), outputs=(20, 20),
    ),
    "chunks of 64 tokens and 8 slots": FlagCase(
        "chunked-prefill-size", {"chunked-prefill-size": 64, "max-running-requests": 8},
        {"chunked-prefill-size": 2048, "max-running-requests": 128},
        prompt=(60, 60), outputs=(20, 20), rows=400, rounds=3,
    ),
    "pages of 256 tokens, rows of 64": FlagCase(
        "page-size", {"page-size": 256}, {"page-size": 1}, outputs=(40, 40)
    ),
    "the prefix cache off, prefixes of 200 tokens": FlagCase(
        "disable-radix-cache", {"disable-radix-cache": True}, {"disable-radix-cache": None},
        prefix=200, prompt=(20, 20), outputs=(8, 8), measure="prompt_tokens_per_computed",
    ),
    "rows in random order, prefixes of 200 tokens": FlagCase(
        "schedule-policy", {"schedule-policy": "random", "max-total-tokens": 8000},
        {"schedule-policy": "fcfs"}, rows=3000,
        prefix=200, prompt=(20, 20), outputs=(8, 8), measure="prompt_tokens_per_computed",
    ),
}  # fmt: skip


def make_job(case: FlagCase, model: Path, folder: Path) -> dict[str, Any]:
    """Write the case's input; return its job."""
    made = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [made.randrange(100, VOCABULARY) for _ in range(count)]

    prefix, ids = tokens(case.prefix), []
    for row in range(case.rows):
        prefix = tokens(case.prefix) if row % GROUP == 0 else prefix
        ids.append([*prefix, *tokens(made.randint(*case.prompt))])
    folder.mkdir(parents=True)
    table = {
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "tokens": pa.array([made.randint(*case.outputs) for _ in ids], pa.int32()),
    }
    pq.write_table(pa.table(table), folder / "input.parquet")
    own: dict[str, Any] = {"max_new_tokens": {"column": "tokens"}, "ignore_eos": True, "temperature": 0}
    if case.asked:
        own = {"max_new_tokens": case.asked, "stop_token_ids": STOPS, "temperature": 1.0}
    return {
        "input": {"path": str(folder / "input.parquet")},
        "prompt": {"input_ids": "input_ids"},
        "sampling": own,
        "output": {"path": str(folder / "run")},
        "engine": {
            "kind": "server", "model": str(model), "device": "cpu", "args": {**ARGS, **case.bad},
            "env": {"OMP_NUM_THREADS": "1"},
        },
    }  # fmt: skip


def followed(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Put flags and variables of the server into a job; None removes one."""
    engine = job["engine"]
    changed: dict[str, dict[str, Any]] = {"args": {**engine["args"]}, "env": {**engine["env"]}}
    for name, value in changes.items():
        place = changed["env" if name.isupper() else "args"]
        place[name] = str(value) if name.isupper() else value
    changed["args"] = {name: value for name, value in changed["args"].items() if value is not None}
    return {**job, "engine": {**engine, **changed}}


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job afresh; return what its scheduler counted."""
    run = Path(job["output"]["path"])
    shutil.rmtree(run, ignore_errors=True)
    report = batchrunner.run(job)
    log = (run / "engine-server.log").read_text(errors="replace")
    decodes, prefills = (
        len(re.findall("Decode batch", log)) * LOG_INTERVAL,
        len(re.findall("Prefill batch", log)),
    )
    computed = sum(map(int, re.findall(r"#new-token: (\d+)", log)))
    cached = sum(map(int, re.findall(r"#cached-token: (\d+)", log)))
    return {
        "passes": decodes + prefills, "prefill_passes": prefills, "computed_tokens": computed,
        "tokens_per_pass": round(report.output_tokens / max(1, decodes + prefills), 3),
        "prompt_tokens_per_computed": round((computed + cached) / max(1, computed), 3),
        "retractions": len(re.findall("Retract requests", log)), "rows_ok": report.rows_ok,
    }  # fmt: skip


def asked(job: dict[str, Any]) -> tuple[list[Advice], bool]:
    """Return what `advise` would change in a job, and whether it calls the run healthy."""
    judgement = advise(job["output"]["path"])
    print("\n".join(judgement.lines()), file=sys.stderr, flush=True)
    return [advice for advice in judgement.advice if advice.change], judgement.healthy


def changes_of(advice: Advice) -> dict[str, Any]:
    """Return the flags and variables that an advice sets."""
    return {**advice.args, **advice.env}


def measure(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run a case with its bad value, then as advised, or as is known to be right."""
    case = CASES[name]
    job = make_job(case, model, folder)
    print(f"--- {name}", file=sys.stderr, flush=True)
    bad = measured(job)
    advice, healthy = asked(job)
    shutil.copy(folder / "run" / "engine-server.log", folder / "bad.log")
    first = changes_of(advice[0]) if advice else {}
    named = [flag for one in advice for flag in changes_of(one)]
    steps: list[dict[str, Any]] = []
    result = bad
    while first and len(steps) < case.rounds:
        job = followed(job, first)
        result = measured(job)
        rest, is_healthy = asked(job)
        steps.append({"changes": first, **result, "healthy": is_healthy})
        first = changes_of(rest[0]) if rest and not is_healthy else {}
    gain = result[case.measure] / bad[case.measure]
    found: dict[str, Any] = {
        "flag": case.flag, "measure": case.measure, "bad": bad, "healthy": healthy,
        "seen": case.flag in named, "first": bool(steps) and case.flag in steps[0]["changes"],
        "advice": [one.as_dict() for one in advice], "steps": steps, "gain": round(gain, 3),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if not found["first"]:
        right = measured(followed(make_job(case, model, folder / "known"), case.known))
        found["known"] = {
            "changes": case.known,
            **right,
            "gain": round(right[case.measure] / bad[case.measure], 3),
        }
    print(json.dumps({k: v for k, v in found.items() if k != "advice"}), file=sys.stderr, flush=True)
    return found


def summary(found: dict[str, Any]) -> str:
    """Say in a line what was found."""
    named = sum(case["first"] for case in found.values())
    false = [
        name for name, case in found.items() if case["healthy"] and case.get("known", case)["gain"] >= WORTH
    ]
    return f"advise names the bad flag first in {named} of {len(found)} cases; healthy in error: {len(false)}"


def table(found: dict[str, Any]) -> list[str]:
    """Return the table for docs/advice.md."""
    lines = ["| bad value | flag | seen | named first | gain of what was named | gain of the flag |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, case in found.items():
        known = f"{case['known']['gain']:.2f}" if "known" in case else "the same"
        named = f"{case['gain']:.2f}" if case["steps"] else "nothing"
        seen, first = ("yes" if case[key] else "no" for key in ("seen", "first"))
        lines.append(f"| {name} | `{case['flag']}` | {seen} | {first} | {named} | {known} |")
    return lines


def measure_flags(model: Path, folder: Path, only: list[str]) -> None:
    """Measure the cases of the flags in `only`, all by default; those measured before are kept."""
    path = RESULTS / "advise_flags.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else {}
    for number, (name, case) in enumerate(CASES.items()):
        if not only or case.flag in only:
            found[name] = measure(name, model, folder / str(number))
            kept = {name: found[name] for name in CASES if name in found}
            save("advise_flags", summary(kept), {"cases": kept}, ("sglang", "torch"), "advice")
            print("\n".join(table(kept)))


def main() -> None:
    GUIDES.span_s, GUIDES.samples = 2, 5  # runs of some seconds are enough: each shows its sign all the time
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="some of the flags; all by default")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--keep", type=Path, help="where to leave the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-advice-") as scratch:
        folder = options.keep or Path(scratch)
        model = make_tiny_llama(folder / "tiny", options.tokenizer, vocabulary=VOCABULARY)
        measure_flags(model, folder, options.cases)


if __name__ == "__main__":
    main()
