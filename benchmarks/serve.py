"""Does `batchrun serve` lose or double anything when it is killed, and what do ten batches at once cost?

Kills: a client uploads files and creates batches without a pause, and the server is killed with SIGKILL at
random moments, also during uploads. At the end each file that was answered must be there, byte for byte, and
each batch that was accepted must complete with each of its lines once.

Load: 50,000 lines in ten batches at once, and the same lines in one batch. The peak of the server's memory,
the time, and the engine's queue while rows are left to send.

The engine is simulated, the client is that of OpenAI.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from batchrunner.core.console import tell
from benchmarks.measure import peak_mb, save

CHAT = "/v1/chat/completions"
KILLED = ("engine.step_s=0.02", "engine.max_running=32")
LOADED = ("engine.step_s=0.02", "engine.max_running=256")
LINES, MOST_BATCHES, BATCHES = 60, 40, 10
LINES_OF_LOAD = 50_000


def requests_of(count: int, name: str) -> bytes:
    """Return a batch file."""
    bodies = (
        {"messages": [{"role": "user", "content": f"question {number} of {name}"}], "max_tokens": 20}
        for number in range(count)
    )
    lines = (
        {"custom_id": f"{name}-{number}", "method": "POST", "url": CHAT, "body": body}
        for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@contextlib.contextmanager
def serving(state: Path, settings: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """Run the server; it is killed at the end."""
    sets = [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-m", "batchrunner", "serve", "--engine", "simulated", "--port", "0"]
    with subprocess.Popen(
        [*command, "--dir", str(state), *sets], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            yield process, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        finally:
            process.kill()


def ended(client: openai.OpenAI, batch: str) -> Any:
    """Wait for the end of a batch."""
    while True:
        found = client.batches.retrieve(batch)
        if found.status in {"completed", "failed", "expired", "cancelled"}:
            return found
        time.sleep(0.2)


def kills(count: int, made: random.Random, state: Path) -> dict[str, Any]:
    """Kill the server so often; return what was accepted and what of it is wrong."""
    files: dict[str, bytes] = {}
    batches: dict[str, str] = {}

    def call(client: openai.OpenAI) -> None:
        with contextlib.suppress(openai.APIError):
            while len(batches) < MOST_BATCHES or made.random() < 0.9:
                content = requests_of(LINES * made.choice((1, 1, 1, 500)), f"f{len(files)}")
                file = client.files.create(file=("requests.jsonl", content), purpose="batch").id
                files[file] = content
                if len(content) < 1 << 20 and len(batches) < MOST_BATCHES:
                    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
                    batches[batch.id] = file

    for number in range(count):
        with serving(state, KILLED) as (_, client):
            calling = threading.Thread(target=call, args=(client,))
            calling.start()
            time.sleep(made.uniform(0.05, 3.0))
        calling.join()
        tell(f"kill {number + 1}: {len(files)} files, {len(batches)} batches")
    wrong: list[str] = []
    with serving(state, KILLED) as (_, client):
        wrong += [file for file, content in files.items() if client.files.content(file).content != content]
        for batch, file in batches.items():
            found = ended(client, batch)
            lines = client.files.content(found.output_file_id or "none").text.splitlines()
            names = [json.loads(line)["custom_id"] for line in lines]
            if names != [json.loads(line)["custom_id"] for line in files[file].splitlines()]:
                wrong.append(batch)
    left = [path.name for path in (state / "files").glob(".*")]
    return {"kills": count, "files": len(files), "batches": len(batches), "wrong": wrong, "left": left}


def queues_of(state: Path) -> list[int]:
    """Return the newest queue in the event log of each run that has rows to send."""
    found = []
    for log in (state / "batches").glob("*/events.jsonl"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            *_, last = (
                line for line in log.read_bytes()[-20_000:].splitlines() if b'"event":"sample"' in line
            )
            event = json.loads(last)
            if event["unsent"] > 500:
                found.append(event["signals"][0]["queue"])
    return found


def load(batches: int, state: Path) -> dict[str, Any]:
    """Send all lines in so many batches at once."""
    queues: list[int] = []
    with serving(state, LOADED) as (process, client):
        parts = [requests_of(LINES_OF_LOAD // batches, f"b{number}") for number in range(batches)]
        uploaded = [client.files.create(file=("a.jsonl", part), purpose="batch").id for part in parts]
        began = time.monotonic()
        names = [
            client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
            for file in uploaded
        ]
        while any(client.batches.retrieve(name).status != "completed" for name in names):
            queues += queues_of(state)[:1]
            time.sleep(0.5)
        took_s = time.monotonic() - began
        peak = peak_mb(process.pid)
        ends = [client.batches.retrieve(name) for name in names]
    settled = queues[4:]
    return {
        "batches": batches,
        "lines": sum(batch.request_counts.completed for batch in ends),
        "took_s": round(took_s, 1),
        "peak_mb": round(peak),
        "queue_in_band_share": round(
            sum(100 <= queue <= 2000 for queue in settled) / max(1, len(settled)), 2
        ),
        "queue_range": [min(settled), max(settled)] if settled else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        killed = kills(args.kills, random.Random(args.seed), Path(scratch) / "killed")
        loads = [load(batches, Path(scratch) / f"load-{batches}") for batches in (1, BATCHES)]
    is_good = not killed["wrong"] and not killed["left"]
    line = (
        f"serve: {killed['kills']} kills, {killed['files']} files and {killed['batches']} batches accepted, "
        f"{len(killed['wrong'])} wrong; {LINES_OF_LOAD:,} lines in {BATCHES} batches: "
        f"{loads[1]['peak_mb']} MB (in one: {loads[0]['peak_mb']} MB)"
    )
    save("serve", line, {"goal_met": is_good, "kills": killed, "loads": loads}, ("batchrunner", "openai"))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
