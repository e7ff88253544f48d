"""Print where a run's results are and three of them: `python jobs/show.py out/summarize`."""

import sys

import pyarrow.parquet as pq

WIDTH = 300


def main(run: str) -> None:
    """Print three rows of the run's parts."""
    table = pq.read_table(f"{run}/parts").sort_by("row")
    print(f"\n{table.num_rows} results in {run}/parts, for example:")
    for row in table.slice(0, 3).to_pylist():
        print(f"\n[{row['row']}] {row['title']}")
        print(f"    {' '.join((row['output'] or row['error']).split())[:WIDTH]}")


main(sys.argv[1])
