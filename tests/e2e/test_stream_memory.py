"""A stream of any length takes the same memory."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

ROWS, MOST_GROWTH_MIB = 80_000, 60
PROGRAM = """
import asyncio, resource, sys
import batchrunner

ROWS = int(sys.argv[1])

def most_memory_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def rows():
    for number in range(ROWS):
        yield {"text": f"{number} " + "x" * 2500}

async def main():
    ended, begin = 0, 0
    async for row in batchrunner.stream(
        rows(), prompt={"text": "text"}, engine={"kind": "simulated", "step_s": 0},
        columns=["text"], sampling={"max_new_tokens": 1},
    ):
        ended += 1
        if ended == ROWS // 10:
            begin = most_memory_mib()
    print(ended, most_memory_mib() - begin)

asyncio.run(main())
"""


def test_a_long_stream_takes_no_more_memory_than_a_short_one() -> None:
    """After the first 8,000 rows of 2.5 kB, the other 72,000 add nothing to the process."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROWS)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    rows, growth_mib = map(int, ended.stdout.split())
    assert rows == ROWS
    assert growth_mib < MOST_GROWTH_MIB  # the rows have 200 MB together
