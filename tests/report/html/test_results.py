"""Answers are shown with the prompts that they answer."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import batchrunner
from tests.conftest import ROOT, job_of, write_rows
from tests.support.page import page_of
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ({"text": "text"}, "its prompt row 3"),
        ({"user": "Say {{ text }}", "system": "Be {{ id }}."}, "its prompt system: Be 3. user: Say row 3"),
    ],
)
def test_the_page_shows_prompts_beside_answers(tmp_path: Path, prompt: dict[str, str], shown: str) -> None:
    """The prompts of the rows shown are made again from the input, which may be several files."""
    for at in range(3):
        write_rows(tmp_path / "in" / f"{at}.parquet", 2, first=2 * at)
    job = job_of(tmp_path, input={"path": str(tmp_path / "in")}, prompt=prompt)
    batchrunner.run(job)
    assert shown in page_of(tmp_path / "run").text
    # an input that has changed since would give the wrong prompts
    write_rows(tmp_path / "in" / "1.parquet", 2, first=70)
    page = page_of(tmp_path / "run").text
    assert shown not in page
    assert "its prompt" in page
    for file in (tmp_path / "in").iterdir():
        file.unlink()
    assert "its prompt" not in page_of(tmp_path / "run").text


def test_prompts_are_shown_where_a_program_parses_answers(tmp_path: Path) -> None:
    """A function that no file has is needed for the answers only."""
    write_rows(tmp_path / "input.parquet", 3)
    job = job_of(tmp_path, parse={"python": lambda text: {"size": len(text)}, "columns": {"size": "int32"}})
    batchrunner.run(job)
    assert "its prompt row 1" in page_of(tmp_path / "run").text


def test_the_examples_are_shown_with_prompts(tmp_path: Path) -> None:
    """`make run` and `make demo` end with three rows, each with its prompt and its answer."""
    write_rows(tmp_path / "input.parquet", 3, title=["A", "B", "C"])
    job = job_of(tmp_path, input={"columns": ["title"]}, prompt={"user": "Say {{ text }}"})
    batchrunner.run(job)
    command = [sys.executable, str(ROOT / "jobs" / "show.py"), str(tmp_path / "run")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    assert "[1] B\n    user: Say row 1\n    " in shown
