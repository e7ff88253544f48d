"""Make the pictures of the docs from a real run on the simulated engine: what `make docs-pictures` does.

The terminal is an SVG of what the command prints into a terminal; the report is a PNG of the page that the
run leaves. Needs Chromium and data/docs.parquet.
"""

import asyncio
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.support.page import new_page

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "assets"
COLUMNS, LINES = 100, 40
DURING = 0.6
"""Share of the rows at which the picture during a run is taken."""
WIDTH, HEIGHT = 1100, 1000
"""Pixels of the report's picture: the head of the page."""
SHARE = re.compile(r"(\d+)%\|")


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.gettempdir()) / "batchrunner-demo"  # the report shows this path
    shutil.rmtree(directory, ignore_errors=True)
    try:
        shutil.copytree(ROOT / "jobs", directory / "jobs")
        (directory / "data").symlink_to((ROOT / "data").resolve())
        command = "batchrun jobs/demo.yaml"
        printed = recorded(command, directory)
        (PICTURES / "terminal.svg").write_text(drawn(command, until(printed, DURING)))
        subprocess.run([sys.executable, "-m", "batchrunner", "report", "out/demo"], cwd=directory, check=True)
        asyncio.run(photographed(directory / "out" / "demo" / "report.html", directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for path in sorted(PICTURES.glob("*.svg")) + sorted(PICTURES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def recorded(command: str, directory: Path) -> str:
    """Return what a `batchrun` command prints into a terminal of COLUMNS x LINES."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, COLUMNS))
    environ = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "batchrunner", *command.split()[1:]]
    with subprocess.Popen(
        program, cwd=directory, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        printed = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                printed += chunk
        except OSError:  # the program has closed the terminal
            pass
        os.close(ours)
    assert running.returncode == 0, printed.decode()
    return printed.decode()


def until(printed: str, share: float) -> str:
    """Return what was printed until the bar had reached this share of the rows."""
    for bar in SHARE.finditer(printed):
        if int(bar[1]) >= 100 * share:
            return printed[: printed.index("\r", bar.end())]
    raise AssertionError("the bar never came so far")


def shown(printed: str) -> list[str]:
    """Return the lines that a terminal shows after it got this, with their colours."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in printed.split("\n")]


def drawn(command: str, printed: str) -> str:
    """Return a terminal as an SVG, after a command printed this."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi("\n".join(shown(printed)).rstrip()))
    svg = console.export_svg(title="batchrun (simulated engine)", theme=MONOKAI)
    svg = re.sub(r"<!-- .*? -->", "", svg)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # the reader's own font: no network
    return re.sub(r"font-family: Fira Code, monospace", "font-family: monospace", svg)


async def photographed(report: Path, scratch: Path) -> None:
    """Take a picture of the head of a report in light and in dark."""
    for name, dark in (("light", False), ("dark", True)):
        async with new_page(scratch / name) as page:
            await page.call("Emulation.setScrollbarsHidden", hidden=True)
            await page.open(report.as_uri(), width=WIDTH, height=HEIGHT, dark=dark)
            await page.picture(PICTURES / f"report-{name}.png", height=HEIGHT)


if __name__ == "__main__":
    main()
