"""Does anything get lost, doubled or answered from an old text, whatever options the starts of a run have?

Some hundreds of scenarios, see tests/support/run_scenarios.py: starts with `--fresh`, `--retry-failed`,
`--join`, `--background`, `output.reuse`, estimates and limits that change, on an input that grows and is
corrected. They are killed, stopped and put to sleep at chosen system calls. Every fourth run lies in an
object store.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from batchrunner.core.console import tell
from benchmarks.measure import save
from tests.support.fake_sglang import FakeSGLang
from tests.support.run_scenarios import Scenario, telling
from tests.support.store_server import VARIABLES, new_bucket, store_server


def is_right(directory: Path, seed: int, store: str | None) -> bool:
    """Play a scenario; say what was done where a row is lost, doubled or out of date."""
    bucket = None if store is None else new_bucket(store)
    with FakeSGLang() as server:
        scenario = Scenario(directory, seed, server, bucket)
        try:
            with telling(scenario):
                scenario.play()
        except AssertionError as failure:
            tell(f"seed {seed}: {failure}", *getattr(failure, "__notes__", ()))
            return False
    return True


def main() -> None:
    """Play the scenarios, and save how many were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000, help="the seed of the first one")
    args = parser.parse_args()
    began, wrong = time.monotonic(), []
    with store_server() as store, tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        os.environ |= {**VARIABLES, "AWS_ENDPOINT_URL": store, "XDG_CACHE_HOME": f"{scratch}/cache"}
        for number in range(args.scenarios):
            seed = args.seed + number
            directory = Path(scratch, f"scenario-{number}")
            directory.mkdir()
            if not is_right(directory, seed, store if number % 4 == 0 else None):
                wrong.append(seed)
            if number % 10 == 9:
                tell(f"{number + 1} scenarios, {len(wrong)} wrong")
    line = f"torture of starts: {args.scenarios} scenarios, {len(wrong)} wrong"
    figures = {
        "goal_met": not wrong, "wrong_seeds": wrong, "seed": args.seed,
        "took_s": round(time.monotonic() - began, 1),
    }  # fmt: skip
    save("torture_starts", line, figures, ("batchrunner", "pyarrow"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
