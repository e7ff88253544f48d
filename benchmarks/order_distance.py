"""How far behind its leader must a row be to find its beginning in the cache? SGLang on the CPU.

`sglang.Engine.generate` gets a list in which everything waits behind one long prompt, so that admission
passes are as they are with a long queue: a leader, unrelated prompts of so many tokens together, a follower
that begins as the leader does. What the follower finds is the only hit there can be. The leader puts out so
many tokens that it still runs when the follower comes, or one only. And a group whose rows follow each other.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engine import SERVER_ARGS
from benchmarks.measure import save
from benchmarks.peer import Peer, peer
from benchmarks.prompts import Row, Words
from tests.support.tiny_model import make_tiny_llama

HEAD, OWN, FILLER, EACH = 430, 32, 128, 8
BETWEEN = (0, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12_288)
"""Tokens of the prompts between leader and follower. A pass takes 4,096 tokens: SGLang's
`--chunked-prefill-size` on a CPU."""
BLOCKER = Row((("blocker", 4000),), 1)


def rows_of(between: int, outputs: int) -> list[Row]:
    """Put unrelated prompts between a leader that puts out so many tokens and its follower."""
    leader, follower = (Row((("head", HEAD), (name, OWN)), 1) for name in ("leader", "follower"))
    fillers = [Row(((f"f{number}", FILLER),), 1) for number in range(between // FILLER)]
    return [BLOCKER, leader._replace(outputs=outputs), *fillers, follower]


def found_in_cache(engine: Peer, folder: Path, words: Words, rows: list[Row]) -> int:
    """Send the rows; return how many tokens were found in the cache."""
    table = {
        "text": ["".join(f" {word}" for word in words.of(row)) for row in rows],
        "tokens": pa.array([row.outputs for row in rows], pa.int32()),
    }
    pq.write_table(pa.table(table), folder / "input.parquet")
    cached: int = engine.generate(folder / "input.parquet")["cached_tokens"]
    return cached


def measure(tokenizer: Path, repeats: int) -> dict[str, Any]:
    words = Words(tokenizer)
    group = [BLOCKER, *(Row((("head", HEAD), (f"row {n}", OWN)), 1) for n in range(EACH))]
    with tempfile.TemporaryDirectory(prefix="bench-order-distance-") as scratch:
        folder = Path(scratch)
        with peer(make_tiny_llama(folder / "tiny", tokenizer), folder) as engine:
            found_in_cache(engine, folder, words, group)  # the first call meets cold code paths
            together = [found_in_cache(engine, folder, words, group) for _ in range(repeats)]
            distances = {
                f"leader puts out {outputs}": {
                    between: [
                        found_in_cache(engine, folder, words, rows_of(between, outputs))
                        for _ in range(repeats)
                    ]
                    for between in BETWEEN
                }
                for outputs in (1, 32)
            }
    return {"group_of": EACH, "head_tokens": HEAD, "group_together": together, "follower": distances}


def report(found: dict[str, Any]) -> None:
    need = {
        kind: min((between for between, hits in by.items() if min(hits) >= HEAD), default=None)
        for kind, by in found["follower"].items()
    }
    told = "; ".join(f"{kind}: {between} tokens behind" for kind, between in need.items())
    line = (
        f"distance: of the {(EACH - 1) * HEAD} tokens that {EACH} rows in a row could share "
        f"{max(found['group_together'])} were found; always found by the follower: {told}"
    )
    save("order_distance", line, {"server_args": SERVER_ARGS, **found}, ("batchrunner", "sglang", "torch"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    args = parser.parse_args()
    report(measure(args.tokenizer, args.repeats))


if __name__ == "__main__":
    main()
