"""Print where a run's results are and three of them: `python jobs/show.py out/summarize`."""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

from batchrunner.report.html.results import prompts_of

WIDTH = 300


def main(run: str) -> None:
    """Print three rows of the run's parts, with their prompts."""
    table = pq.read_table(f"{run}/parts").sort_by("row")
    print(f"\n{table.num_rows} results in {run}/parts, for example:")
    rows = table.slice(0, 3).to_pylist()
    prompts = prompts_of(json.loads(Path(run, "run.json").read_text()), [row["row"] for row in rows])
    for row in rows:
        print(f"\n[{row['row']}] {row['title']}")
        for text in (prompts.get(row["row"], "(its input is gone)"), row["output"] or row["error"]):
            print(f"    {' '.join(text.split())[:WIDTH]}")


main(sys.argv[1])
