"""Modules of Python functions, as a job's author writes them beside the job file."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LABEL = dedent("""
    from typing import TypedDict

    class Label(TypedDict):
        first: str
        length: int
        words: list[str]

    def label(answer) -> Label:
        return {"first": answer.split()[0], "length": len(answer), "words": answer.split()}
""")
"""A function `label` of an answer."""


def write_module(directory: Path, code: str, name: str = "hooks") -> Path:
    """Write a module and return its path."""
    path = directory / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(code))
    return path


def children_of(process: int) -> set[int]:
    """Return the processes that a process has started and that live."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_alive(process: int) -> bool:
    """Tell whether a process lives."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


HOOKED: dict[str, Any] = {
    "prompt": {"python": "hooks:prompt"},
    "parse": "hooks:parse",
    "check": {"python": "hooks:judge", "tries": 5},
}
"""Parts of such a job; its samples are two."""


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
    assert sorted(row["row"] for row in results) == list(range(rows))
    assert {len(row["output"]) for row in results} == {2}
    assert not any(row["error"] for row in results)
    assert all(row["size"] == [*map(len, row["output"])] for row in results)
    assert min(row["attempts"] for row in results) >= 2
