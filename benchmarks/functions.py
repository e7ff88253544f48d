"""What does a Python function cost? Rows a second through a trivial one, as prompts and as columns.

200,000 rows of a text of 60 characters. Prompts are made as for sending, of a template and by a function that
does the same; answers are parsed by a function that counts their characters, 256 at once, as answers come in.
The CPU time is that of this process, in which everything else of a run happens; the functions' processes have
their own.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from batchrunner.job.answers import open_functions
from batchrunner.job.fields import PARSE
from batchrunner.job.load import load_job
from batchrunner.runner.prepare import prepare
from benchmarks.measure import interval, save

GOAL_ROWS_S = 20_000
AT_ONCE = 256
WARM_ROWS = 20_000
FUNCTIONS = """
from typing import TypedDict

class Size(TypedDict):
    size: int

def prompt(row):
    return "Say: " + row["text"]

def parse(answer) -> Size:
    return {"size": len(answer)}
"""
PROMPTS = {"template": {"text": "Say: {{ text }}"}, "prompt": {"python": "trivial:prompt"}}
ANSWER = "an answer of the model, of about as many words as a title has"


def made_prompts(job: dict[str, Any], rows: int) -> tuple[float, float]:
    """Return the rows a second, and the microseconds of CPU a row, at which the prompts of a job are made."""
    with closing(prepare(load_job(job))) as prepared:
        for _ in prepared.batches(BitMap64(range(WARM_ROWS))):
            pass
        return _timed(lambda: sum(map(len, prepared.batches(BitMap64(range(rows))))), rows)


def parsed_answers(job: dict[str, Any], rows: int) -> tuple[float, float]:
    """Return the same for answers that are parsed."""
    functions = open_functions(load_job(job))
    assert functions is not None

    async def take(answers: int) -> None:
        for _ in range(answers):
            await functions.call(PARSE, ANSWER)

    async def take_all() -> None:
        await asyncio.gather(*(take(rows // AT_ONCE) for _ in range(AT_ONCE)))

    with closing(functions):
        asyncio.run(take(AT_ONCE))
        return _timed(lambda: asyncio.run(take_all()), rows)


def _timed(work: Any, rows: int) -> tuple[float, float]:
    began, used = time.perf_counter(), time.process_time()
    work()
    return rows / (time.perf_counter() - began), (time.process_time() - used) / rows * 1e6


def main() -> None:
    """Measure, print one line and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"template": [], "prompt": [], "parse": []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "trivial.py").write_text(FUNCTIONS)
        texts = [f"row {row}: a text of the usual length of a title, or so" for row in range(asked.rows)]
        pq.write_table(pa.table({"text": texts}), directory / "rows.parquet")
        base = {
            "input": {"path": str(directory / "rows.parquet")},
            "output": {"path": str(directory / "run")},
            "engine": {"kind": "simulated"},
            "python_path": [scratch],
        }
        for _ in range(asked.rounds):
            found["template"].append(
                made_prompts({**base, "prompt": {"text": "Say: {{ text }}"}}, asked.rows)
            )
            found["prompt"].append(made_prompts({**base, "prompt": {"python": "trivial:prompt"}}, asked.rows))
            job = {**base, "prompt": {"text": "text"}, "parse": "trivial:parse"}
            found["parse"].append(parsed_answers(job, asked.rows))
    speeds = {name: interval([speed for speed, _ in values]) for name, values in found.items()}
    cpu = {name: interval([used for _, used in values]) for name, values in found.items()}
    said = [
        f"{name} {speeds[name].median:,.0f} rows/s ({cpu[name].median:.1f} us of CPU a row here)"
        for name in found
    ]
    line = f"functions: {', '.join(said)} (goal: {GOAL_ROWS_S:,} rows/s)"
    figures = {"rows_s": speeds, "cpu_us": cpu}
    save("functions", line, figures, ["batchrunner", "pyarrow"])


if __name__ == "__main__":
    main()
