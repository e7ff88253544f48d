"""How fast is input read from an object store, beside obstore alone?

A local server answers as S3 does, from files, by sendfile, so that a range costs it nothing. One side opens a
data set and reads a column of it as a run does; the other gets each object whole by obstore, eight at once,
and reads the same column with pyarrow. Judged by the CPU seconds of the reading process and by its wall time,
in alternating pairs of fresh processes; requests and bytes are counted by the server, memory by the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from xml.sax.saxutils import escape

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from aiohttp import web
from pyroaring import BitMap64

from batchrunner.input.dataset import Dataset
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress
from batchrunner.output.objects import open_bucket
from benchmarks.measure import in_fresh_process, interval, save

GOAL = 1.2
AT_ONCE = 8
"""Objects that obstore alone gets at once."""


class FileServer:
    """The files of a directory as the bucket `data`, at `url` while the block runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = ""
        self.requests = 0
        self.bytes = 0
        self._up, self._over = threading.Event(), asyncio.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._up.set()
        await self._over.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if "list-type" in request.query:
            return self._listing(request.query.get("prefix", ""))
        path = self._directory / request.path.removeprefix("/data/")
        if not path.is_file():
            return web.Response(status=404, body=b"<Error><Code>NoSuchKey</Code><Message>-</Message></Error>")
        if found := request.headers.get("Range"):
            begin, _, end = found.removeprefix("bytes=").partition("-")
            self.bytes += int(end) + 1 - int(begin) if begin else int(end)
        elif request.method == "GET":
            self.bytes += path.stat().st_size
        return web.FileResponse(path, chunk_size=1 << 20)

    def _listing(self, prefix: str) -> web.Response:
        entries = "".join(
            f"<Contents><Key>{escape(path.name)}</Key><Size>{(stat := path.stat()).st_size}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{stat.st_mtime_ns:x}-{stat.st_size:x}"</ETag></Contents>'
            for path in sorted(self._directory.iterdir())
            if path.name.startswith(prefix)
        )
        entries = f"<IsTruncated>false</IsTruncated>{entries}"
        body = f"<?xml version='1.0'?><ListBucketResult>{entries}</ListBucketResult>"
        return web.Response(body=body.encode(), content_type="application/xml")


def ours() -> int:
    """Return the number of rows that the runner's own reader finds."""
    dataset = Dataset("s3://data")
    return sum(len(batch.rows) for batch in dataset.read(BitMap64(range(dataset.total_rows)), ["text"]))


def alone() -> int:
    """Return the number of rows that obstore and pyarrow find."""
    bucket = open_bucket(StoreAddress("s3", "data", ""), StorageSpec())
    keys = [found["path"] for page in obstore.list(bucket) for found in page]

    def rows(key: str) -> int:
        content = pa.BufferReader(obstore.get(bucket, key).bytes())
        batches = pq.ParquetFile(content).iter_batches(columns=["text"], use_threads=False)
        return sum(batch.num_rows for batch in batches)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(rows, keys))


SIDES = {"ours": ours, "obstore": alone}


def one_side(side: str) -> None:
    """Read once, and print what it took."""
    began, cpu = time.perf_counter(), time.process_time()
    rows = SIDES[side]()
    taken = {"rows": rows, "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    print(json.dumps({**taken, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))


def write_files(directory: Path, files: int, mb: float) -> None:
    """Write files of texts that do not compress; a row group has at most 16 MB."""
    made = np.random.default_rng(1)
    for number in range(files):
        rows = max(1, int(mb * 1e6 / 2048))
        schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
        with pq.ParquetWriter(directory / f"{number:05d}.parquet", schema, compression="none") as file:
            for first in range(0, rows, 8192):
                ids = list(range(first, min(first + 8192, rows)))
                letters = made.integers(97, 123, size=(len(ids), 2040), dtype=np.uint8)
                file.write_table(pa.table({"id": ids, "text": [line.tobytes().decode() for line in letters]}))


def measure(files: int, mb: float, pairs: int) -> dict[str, Any]:
    """Return what both sides took, over all pairs."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="bench-read-") as scratch:
        write_files(Path(scratch), files, mb)
        with FileServer(Path(scratch)) as server:
            os.environ |= {
                "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_REGION": "us-east-1",
            }  # fmt: skip
            for turn in range(pairs):
                for side in SIDES if turn % 2 else reversed(SIDES):
                    before = server.requests, server.bytes
                    taken = in_fresh_process("benchmarks.read_store", "--side", side)
                    taken |= {"requests": server.requests - before[0], "bytes": server.bytes - before[1]}
                    found[side].append(taken)
                    print(side, taken, file=sys.stderr, flush=True)
    ratios = {
        what: interval([our[what] / other[what] for our, other in zip(*found.values(), strict=True)])
        for what in ("cpu_s", "wall_s")
    }
    last = {side: taken[-1] for side, taken in found.items()}
    return {"files": files, "mb": mb, "ratios": ratios, "last": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--files", type=int, default=1000, help="files of 1 MB")
    parser.add_argument("--large", type=float, default=1000, help="MB of the one large file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        one_side(args.side)
        return
    found = [measure(args.files, 1, args.pairs), measure(1, args.large, args.pairs)]
    met = all(each["ratios"]["wall_s"].median <= GOAL for each in found)
    told = [
        {**each, "ratios": {what: str(ratio) for what, ratio in each["ratios"].items()}} for each in found
    ]
    figures = {"goal_met": met, "goal": GOAL, "pairs": args.pairs, "figures": told}
    line = "reading from a store: " + "; ".join(map(in_words, found))
    save("read_store", line, figures, ("batchrunner", "obstore", "pyarrow"))


def in_words(found: dict[str, Any]) -> str:
    ours, other = (found["last"][side] for side in ("ours", "obstore"))
    return (
        f"{found['files']:,} files of {found['mb']:,.0f} MB: CPU {found['ratios']['cpu_s']} and wall time "
        f"{found['ratios']['wall_s']} of obstore's, {ours['requests']:,} requests beside "
        f"{other['requests']:,}, {ours['bytes'] / 1e6:,.0f} MB beside {other['bytes'] / 1e6:,.0f}, "
        f"memory {ours['peak_mb']:,} MB"
    )


if __name__ == "__main__":
    main()
