"""The page on the life of a row names the files through which each row passes, and no others."""

import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import batchrunner
from tests.conftest import ROOT, job_of
from tests.support.fake_sglang import FakeSGLang

PACKAGE = Path(batchrunner.__file__).parent
PAGE = ROOT / "docs" / "how-it-works" / "life-of-a-row.md"
FEW, MANY = 200, 600
"""Rows of two runs: what is called for a row is called so many times more often in the second."""


def calls_by_file(directory: Path, server: FakeSGLang, rows: int) -> Counter[str]:
    """Return the calls of the commonest function of each file in a run of so many rows."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            calls[code.co_filename, code.co_qualname] += 1

    job = job_of(directory / str(rows), server, rows=rows, prompt={"user": "Say {{ text }}"})
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        assert batchrunner.run(job).rows_ok == rows
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    most: Counter[str] = Counter()
    for (file, _), times in calls.items():
        name = Path(file).relative_to(PACKAGE).as_posix()
        most[name] = max(most[name], times)
    return most


def test_the_page_names_the_files_of_a_row(tmp_path: Path, server: FakeSGLang) -> None:
    """A plain row passes through the files of the page's first table, whose functions are called for each."""
    for rows in (FEW, MANY):
        (tmp_path / str(rows)).mkdir()
    few, many = (calls_by_file(tmp_path, server, rows) for rows in (FEW, MANY))
    passed = {file for file in many if many[file] - few[file] >= (MANY - FEW) * 0.9}
    (table,) = re.findall(r"\n## Every row\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)
    named = set(re.findall(r"\]\(\.\./\.\./batchrunner/([\w/]+\.py)\)", table))
    assert passed == named
