"""Print the nearest neighbours of a row of a run with `task: embed`: `show_nearest.py out/embed TITLE`."""

import sys

import duckdb

SHOWN = 5
NEAREST = """
    SELECT title, list_cosine_similarity(embedding, (SELECT embedding FROM results WHERE title = ?)) AS cosine
    FROM results WHERE title <> ? AND error IS NULL ORDER BY cosine DESC LIMIT ?"""


def main(run: str, title: str = "json (module)") -> None:
    """Print the rows whose vectors have the smallest angle to that of the row with this title."""
    connection = duckdb.connect()
    connection.read_parquet(f"{run}/parts/*.parquet").create_view("results")
    found = connection.execute("SELECT count(embedding), max(len(embedding)) FROM results").fetchone()
    assert found is not None
    if not connection.execute("SELECT 1 FROM results WHERE title = ? AND error IS NULL", [title]).fetchone():
        sys.exit(f"{run}: no row with a vector has the title {title!r}")
    print(f"\n{found[0]} vectors of {found[1]} numbers in {run}/parts\n\nnearest to {title}:")
    for name, cosine in connection.execute(NEAREST, [title, title, SHOWN]).fetchall():
        print(f"    {cosine:.3f}  {name}")


main(*sys.argv[1:])
