"""Tokens that `on_repetition` and the bound on blanks in JSON save: SmolLM2-135M, SGLang on the CPU.

Loops: rows that ask about a name of Python's library are answered at temperature 0, once with each mode of
`on_repetition`. A row counts as changed if its text differs from the one of `keep`. A stopped row should
keep a prefix of its whole text. An answer may also differ because other requests were in its batch, whose
size changes the last bits of a sum. Without `keep` among the modes, which takes a fraction of the time,
`tokens_to_limit` is the number of tokens if each stopped loop went on to `max_new_tokens`.

Blanks: rows with a JSON Schema are answered by two servers, of which one has the flag
`constrained-json-max-whitespace-cnt`. All rows are in flight at once, so that the runner cannot protect later
rows by what it learned from earlier ones.

Tokens, rows and decode passes are counts. Seconds depend on other work on the machine.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrunner.core.console import tell
from batchrunner.job.output import REPETITION
from batchrunner.runner.foreground import run_in_foreground
from batchrunner.sglang.flags import MAX_BLANKS_FLAG
from benchmarks.engine import KEY_VARIABLE, Log, Server, flush, serve
from benchmarks.measure import save

SERVER_ARGS: dict[str, Any] = {
    "max-total-tokens": 80_000, "max-running-requests": 32, "context-length": 4096, "decode-log-interval": 1,
    "sleep-on-idle": True,
}  # fmt: skip
BLANKS = 64
"""Value of the flag on the server with the bound, in blanks: the one that a run sets on its own servers."""
LONG_BLANKS = 16
"""An answer counts as padded if it has at least this many blanks in a row."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "summary": {"type": "string", "maxLength": 200},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 5},
    },
    "required": ["name", "summary", "arguments"],
    "additionalProperties": False,
}
LOOPS: dict[str, Any] = {
    "prompt": {"user": "Explain in detail what {{ title }} does in Python's library."},
    "sampling": {"temperature": 0},
}
PACKAGES = ("batchrunner", "sglang", "torch", "xgrammar")
JSON: dict[str, Any] = {
    "prompt": {"user": "Describe {{ title }} of Python's library as pretty-printed JSON, indented by tabs."},
    "sampling": {"temperature": 0, "json_schema": SCHEMA},
    "accept": {"json": False},
}


def write_rows(source: Path, target: Path, rows: int) -> None:
    """Write `rows` names, spread evenly over the documents."""
    documents = pq.read_table(source, columns=["id", "title"])
    step = documents.num_rows // rows
    pq.write_table(documents.take(pa.array(range(0, step * rows, step))), target)


def run_job(server: Server, place: Path, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job on a server; return its counts and texts, and the passes that the scheduler logged."""
    job = place / f"{name}.json"
    job.write_text(json.dumps({
        "input": {"path": str(place / "rows.parquet"), "columns": ["id"]},
        "output": {"path": str(place / name)},
        "engine": {"kind": "attach", "urls": [server.url], "api_key_env": KEY_VARIABLE},
        **fields,
    }))  # fmt: skip
    flush(server)
    log = Log(server.log)
    report = run_in_foreground(str(job), [], fresh=True, retry_failed=False, quiet=True, as_json=False)
    if report.rows_failed or not report.rows_ok:
        tell("\n".join(report.lines()))
    table = pq.read_table(
        place / name / "parts", columns=["id", "output", "finish_reason", "completion_tokens"]
    )
    limit = fields["sampling"]["max_new_tokens"]
    tokens = [
        limit if row["finish_reason"] == REPETITION else row["completion_tokens"] or 0
        for row in table.to_pylist()
    ]
    result = {
        "tokens_to_limit": sum(tokens),
        "output_tokens": report.output_tokens,
        "finish_reasons": report.finish_reasons,
        "rows_ok": report.rows_ok,
        "wall_s": round(report.wall_s, 1),
        "decode_passes": log.work()["decode_passes"],
    }
    tell(f"  {name}: {result}")
    return {**result, "texts": dict(zip(table["id"].to_pylist(), table["output"].to_pylist(), strict=True))}


def compare_texts(whole: Mapping[str, str], shortened: Mapping[str, str]) -> dict[str, int]:
    """Count equal texts, prefixes of the whole text, and all others."""
    equal = sum(shortened[row] == text for row, text in whole.items())
    prefixes = sum(text.startswith(shortened[row]) for row, text in whole.items()) - equal
    return {"equal": equal, "prefixes": prefixes, "others": len(whole) - equal - prefixes}


def longest_blanks(text: str) -> int:
    """Return the length of the longest run of blanks in a text."""
    ends = [-1, *(place for place, character in enumerate(text) if not character.isspace()), len(text)]
    return max(after - before - 1 for before, after in pairwise(ends))


def measure_loops(model: Path, place: Path, max_new_tokens: int, modes: Sequence[str]) -> dict[str, Any]:
    """Answer the rows once with each mode of `on_repetition`, and compare the texts with those of `keep`."""
    sampling = {**LOOPS["sampling"], "max_new_tokens": max_new_tokens}
    with serve(model, place, SERVER_ARGS, name="loops") as server:
        runs = {
            mode: run_job(server, place, mode, {**LOOPS, "sampling": sampling, "on_repetition": mode})
            for mode in modes
        }
    texts = {mode: run.pop("texts") for mode, run in runs.items()}
    whole = texts.pop("keep", None)
    if whole is not None:
        for mode, shortened in texts.items():
            runs[mode]["rows_by_text"] = compare_texts(whole, shortened)
    return {"modes": runs, "max_new_tokens": max_new_tokens}


def measure_blanks(model: Path, place: Path, max_new_tokens: int) -> dict[str, Any]:
    """Answer the rows with a schema on a server without the bound on blanks, and on one with it."""
    fields = {**JSON, "sampling": {**JSON["sampling"], "max_new_tokens": max_new_tokens}}
    runs = {}
    for name, bound in (("unbounded", {}), ("bounded", {MAX_BLANKS_FLAG: BLANKS})):
        with serve(model, place, SERVER_ARGS | bound, name=name) as server:
            runs[name] = run_job(server, place, f"json-{name}", fields)
    texts = {name: run.pop("texts") for name, run in runs.items()}
    for name, run in runs.items():
        run["padded_rows"] = sum(longest_blanks(text or "") >= LONG_BLANKS for text in texts[name].values())
    return {**runs, "rows_by_text": compare_texts(texts["unbounded"], texts["bounded"])}


def report_loops(loops: dict[str, Any]) -> None:
    """Print and save the figures of `on_repetition`."""
    runs = dict(loops["modes"])
    keep = runs.pop("keep", None)
    clauses = [
        f"{mode} ends {run['finish_reasons'].get(REPETITION, 0)} of {run['rows_ok']} rows and generates "
        f"{run['output_tokens']:,} tokens"
        + ("" if keep else f" ({run['tokens_to_limit']:,} if no loop ends by itself)")
        for mode, run in runs.items()
    ]
    whole = [f"keep generates {keep['output_tokens']:,} tokens"] if keep else []
    line = f"waste: on_repetition {'; '.join([*whole, *clauses])}"
    save("waste_loops", line, {"server_args": SERVER_ARGS, **loops}, PACKAGES, "waste")


def report_blanks(blanks: dict[str, Any]) -> None:
    """Print and save the figures of the bound on blanks."""
    without, bounded = blanks["unbounded"], blanks["bounded"]
    line = (
        f"waste: JSON takes {without['output_tokens']:,} output tokens without the bound on blanks "
        f"({without['padded_rows']} rows padded), {bounded['output_tokens']:,} with it "
        f"({bounded['padded_rows']} rows padded)"
    )
    save("waste_json", line, {"server_args": SERVER_ARGS, **blanks}, PACKAGES, "waste")


def main() -> None:
    """Measure one of the two, and write its file to benchmarks/results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loops", "json"))
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1536, help="max_new_tokens of each row")
    parser.add_argument(
        "--modes", nargs="+", default=["keep", "stop", "auto"], help="values of on_repetition"
    )
    parser.add_argument("--model", type=Path, default=Path("data/smollm2-135m-instruct"))
    parser.add_argument("--documents", type=Path, default=Path("data/docs.parquet"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-waste-") as scratch:
        place = Path(scratch)
        write_rows(args.documents, place / "rows.parquet", args.rows)
        if args.what == "loops":
            report_loops(measure_loops(args.model, place, args.tokens, args.modes))
        else:
            report_blanks(measure_blanks(args.model, place, args.tokens))


if __name__ == "__main__":
    main()
