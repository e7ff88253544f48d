"""A reader who follows a page: saves its files, runs its Python and commands, and sees what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.conftest import batchrun
from tests.support.blocks import ROOT, Block, commands_in, is_plain, logical_lines
from tests.support.server_thread import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SAVED_AS = re.compile(r"# ([\w./-]+\.(?:yaml|py))\s*$", re.MULTILINE)
PROGRESS = re.compile(r"^\d\d:\d\d:\d\d .*\n", re.MULTILINE)
"""A line of progress: how many there are depends on the machine."""
FIGURE = re.compile(r"(?:\d+ h )?(?:\d+ min )?\d[\d.,]*")


def without_figures(printed: str) -> str:
    """Return what a command printed without what differs by run: times, speeds, lines of progress."""
    return FIGURE.sub("0", PROGRESS.sub("", printed)).strip()


class PageReader:
    """Follows the blocks of a page in a directory, which is the current one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.printed = ""
        """Output and log of the last block of shell."""

    def take(self, block: Block) -> None:
        """Do what a block says, if it is not marked as `not run`; raises what its Python raises."""
        if block.reason is not None:
            return
        if block.language in {"python", "yaml"} and (name := SAVED_AS.match(block.text)):
            (self._directory / name[1]).write_text(block.text)
        if block.language == "python" and "import ray" in block.text:
            self._run(block, [sys.executable, "-c", block.text], os.environ)  # Ray stays in its process
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
        if block.language == "sh":
            plain = all(map(is_plain, logical_lines(block.text)))
            self.printed = self._in_this_process(block) if plain else self._in_a_shell(block)

    def _in_this_process(self, block: Block) -> str:
        """Run calls of `batchrun`, which is faster so."""
        printed = ""
        for line in logical_lines(block.text):
            done = batchrun(*commands_in(line, "batchrun")[0])
            assert done.exit_code == 0, f"{block}: {line}\n{done.output}"
            printed += done.output
        return printed

    def _in_a_shell(self, block: Block) -> str:
        script = self._directory / ".bin" / "batchrun"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchrunner "$@"\n')
        script.chmod(0o755)
        environ = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}
        return self._run(block, ["bash", "-euo", "pipefail", "-c", block.text], environ)

    def _run(self, block: Block, command: Sequence[str], environ: Mapping[str, str]) -> str:
        """Run a program, which must end well; return what it prints."""
        ended = subprocess.run(
            command, cwd=self._directory, env={**environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{block}\n{ended.stdout}"
        return ended.stdout
