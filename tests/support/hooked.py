"""A job with Python functions at both ends, whose judge rejects the first answer to each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.functions import write_module

if TYPE_CHECKING:
    from pathlib import Path

HOOKED: dict[str, Any] = {
    "prompt": {"python": "hooks:prompt"},
    "parse": "hooks:parse",
    "check": {"python": "hooks:judge", "tries": 5},
}
"""Parts of such a job; its samples are two, a row each."""


def write_hooks(directory: Path) -> None:
    """Write the functions as the module `hooks`, beside the job; the judge notes there what it has seen."""
    seen = directory / "seen"
    seen.mkdir()
    write_module(
        directory,
        f"""
        from pathlib import Path
        from typing import TypedDict


        class Size(TypedDict):
            size: int


        def prompt(row):
            return f"{{row['text']}} of {{row['id']}}"


        def parse(answer) -> Size:
            return {{"size": len(answer)}}


        def judge(answer, row):
            try:
                Path({str(seen)!r}, str(row["id"])).touch(exist_ok=False)
            except FileExistsError:
                return True
            return "once more"
        """,
    )


def check_hooked(results: list[dict[str, Any]], rows: int) -> None:
    """Check that each row is there, with both samples, parsed, after it was asked again."""
    found = sorted((row["row"], row["sample"]) for row in results)
    assert found == [(row, sample) for row in range(rows) for sample in (0, 1)]
    assert not any(row["error"] for row in results)
    assert all(row["size"] == len(row["output"]) for row in results)
    assert min(row["attempts"] for row in results) >= 2
