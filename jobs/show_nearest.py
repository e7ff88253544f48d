"""Print the nearest neighbours of a row of a run with `task: embed`: `show_nearest.py out/embed TITLE`."""

import sys

import duckdb

SHOWN = 5
NO_VECTOR = "{}: no row has a vector"
NEAREST = """
    SELECT title, list_cosine_similarity(embedding, (SELECT embedding FROM results WHERE title = ?)) AS cosine
    FROM results WHERE title <> ? AND error IS NULL ORDER BY cosine DESC LIMIT ?"""


WITH_TITLE = """
    SELECT title FROM results WHERE embedding IS NOT NULL AND title = coalesce(?, title)
    ORDER BY title <> 'json (module)', row LIMIT 1"""
"""The row with a title; where none is given that of the module json, or else the first row."""


def main(run: str, given: str | None = None) -> None:
    """Print the rows whose vectors have the smallest angle to that of the row with this title."""
    connection = duckdb.connect()
    connection.read_parquet(f"{run}/parts/*.parquet").create_view("results")
    if "embedding" not in connection.table("results").columns:
        sys.exit(NO_VECTOR.format(run))
    found = connection.execute("SELECT count(embedding), max(len(embedding)) FROM results").fetchone()
    assert found is not None
    if (row := connection.execute(WITH_TITLE, [given]).fetchone()) is None:
        sys.exit(
            f"{run}: no row with a vector has the title {given!r}" if given else f"{run}: no row has a vector"
        )
    title = row[0]
    print(f"\n{found[0]} vectors of {found[1]} numbers in {run}/parts\n\nnearest to {title}:")
    for name, cosine in connection.execute(NEAREST, [title, title, SHOWN]).fetchall():
        print(f"    {cosine:.3f}  {name}")


main(*sys.argv[1:])
