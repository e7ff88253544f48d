"""Do the owners of a `batchrun serve --keys` lose, mix up or see anything, and does each get its share?

Kills: three owners upload files and create batches without a pause, and the server is killed with SIGKILL at
random moments. At the end each file that was answered must be there for its owner, byte for byte, and for
nobody else. Each batch that was accepted must complete with each of its owner's lines once.

Hostile: two owners have work for the whole time. A third asks for the files and batches of the others, calls
as often as it can, uploads huge files and broken forms, and creates as many batches as it may, with long
prompts or long answers. It must see nothing. Each of the others must get at least 0.9 of its share of the
engine's time. The time of a row is that of the simulated engine: its output tokens, and a little for its
prompt.

The engine is simulated, the client is that of OpenAI.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from batchrunner.core.console import tell
from batchrunner.serve.api_errors import RATE_LIMIT
from benchmarks.measure import save

CHAT = "/v1/chat/completions"
OWNERS = ("anna", "ben", "mallory")
HOSTILE = "mallory"
STEP_S, MOST_RUNNING = 0.04, 32
SETTINGS = (f"engine.step_s={STEP_S}", f"engine.max_running={MOST_RUNNING}", "output.durable=0.5")
PREFILL_TOKENS = 16_384
"""Prompt tokens that a prefill pass of the simulated engine takes in half a step."""
LINES, MOST_BATCHES = 40, 15
ENDED = {"completed", "failed", "expired", "cancelled"}
GOAL = 0.9
WARM_UP_S = 40.0
"""Seconds until all owners have batches that run, and what the first of them got before is made up for."""


def requests_of(name: str, count: int, *, output_tokens: int = 20, prompt: str = "question") -> bytes:
    """Return a batch file whose lines name their owner."""
    lines = []
    for number in range(count):
        body = {
            "messages": [{"role": "user", "content": f"{prompt} {number} of {name}"}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }
        lines.append({"custom_id": f"{name}-{number}", "method": "POST", "url": CHAT, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Service:
    """A server with a file of keys."""

    def __init__(self, state: Path, *, limits: dict[str, Any] | None = None) -> None:
        self.state = state
        self._keys = state.with_suffix(".yaml")
        owners = [{"name": name, "key": f"sk-{name}"} for name in OWNERS]
        owners[-1] |= limits or {}
        self._keys.write_text(json.dumps(owners))

    @contextlib.contextmanager
    def running(self) -> Iterator["Service"]:
        """Run the server; it is killed at the end."""
        sets = [word for each in SETTINGS for word in ("--set", each)]
        command = [sys.executable, "-m", "batchrunner", "serve", "--engine", "simulated", "--port", "0"]
        with subprocess.Popen(
            [*command, "--dir", str(self.state), "--keys", str(self._keys), *sets],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            self.url = process.stdout.readline().strip()
            try:
                yield self
            finally:
                process.send_signal(signal.SIGKILL)

    def client(self, name: str) -> openai.OpenAI:
        """Return the client of an owner."""
        return openai.OpenAI(base_url=self.url, api_key=f"sk-{name}", max_retries=0, timeout=600)


def begin(client: openai.OpenAI, content: bytes, row_s: float) -> Any:
    """Upload a file and create a batch of it, whose rows each take `row_s` seconds of the engine."""
    file = client.files.create(file=("requests.jsonl", content), purpose="batch").id
    return client.batches.create(
        input_file_id=file, endpoint=CHAT, completion_window="24h", metadata={"row_s": str(row_s)}
    )


def ended(client: openai.OpenAI, batch: str) -> Any:
    """Wait for the end of a batch."""
    while (last := client.batches.retrieve(batch)).status not in ENDED:
        time.sleep(0.3)
    return last


def is_hidden(call: Callable[[], object]) -> bool:
    """Tell whether a call for something of another owner is answered as if that did not exist."""
    while True:
        try:
            call()
        except openai.RateLimitError:
            time.sleep(1)
        except (openai.NotFoundError, openai.BadRequestError):
            return True
        else:
            return False


def probes(client: openai.OpenAI, file: str, batch: str) -> list[Callable[[], object]]:
    """Return calls for a file and a batch."""
    return [
        lambda: client.files.retrieve(file),
        lambda: client.files.content(file),
        lambda: client.files.delete(file),
        lambda: client.files.list(after=file),
        lambda: client.batches.retrieve(batch),
        lambda: client.batches.cancel(batch),
        lambda: client.batches.list(after=batch),
        lambda: client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
    ]


@dataclass
class Killed:
    """Three owners whose server is killed again and again."""

    service: Service
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {name: {} for name in OWNERS})
    """Contents of the accepted files, by owner and ID."""
    batches: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in OWNERS})
    """Input files of the accepted batches, by owner and ID."""
    wrong: list[str] = field(default_factory=list)
    """What is lost, changed, or another owner's."""
    seen: list[str] = field(default_factory=list)
    """Batches of others that an owner could see."""

    def call(self, name: str, client: openai.OpenAI) -> None:
        """Upload files and create batches until the server is gone."""
        files, batches = self.files[name], self.batches[name]
        with contextlib.suppress(openai.APIError), client:
            while True:
                content = requests_of(name, LINES, prompt=f"question {len(files)}")
                file = client.files.create(file=("requests.jsonl", content), purpose="batch").id
                files[file] = content
                if len(batches) < MOST_BATCHES:
                    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
                    batches[batch.id] = file
                time.sleep(0.1)

    def kill_once(self, seconds: float) -> None:
        """Run the server for a while, and kill it."""
        with self.service.running():
            clients = {name: self.service.client(name) for name in OWNERS}
            threads = [threading.Thread(target=self.call, args=each) for each in clients.items()]
            for thread in threads:
                thread.start()
            time.sleep(seconds)
        for thread in threads:
            thread.join()

    def check(self, name: str, client: openai.OpenAI) -> None:
        """Check all that an owner has, and that it sees nothing of others."""
        for batch, file in self.batches[name].items():
            last = ended(client, batch)
            text = patiently(client.files.content, last.output_file_id).text
            if ids_in(text) != ids_in(self.files[name][file].decode()):
                self.wrong.append(batch)
        for file, content in self.files[name].items():
            if patiently(client.files.content, file).content != content:
                self.wrong.append(file)
        for file in patiently(client.files.list, limit=10_000):
            # Some of these files are not in `files`, because the reply to their upload was lost.
            text = patiently(client.files.content, file.id).text
            if any(not custom_id.startswith(f"{name}-") for custom_id in ids_in(text)):
                self.wrong.append(file.id)
        for other in OWNERS:
            for batch, file in [*self.batches[other].items()][: 2 * (other != name)]:
                self.seen += [batch for probe in probes(client, file, batch) if not is_hidden(probe)]


def ids_in(text: str) -> list[str]:
    """Return the custom_ids of a file."""
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def patiently(call: Callable[..., Any], *arguments: str, **options: int) -> Any:
    """Return the result of a call, which is repeated while there are too many calls a second."""
    while True:
        with contextlib.suppress(openai.RateLimitError):
            return call(*arguments, **options)
        time.sleep(1)


def kills(count: int, luck: random.Random, state: Path) -> dict[str, Any]:
    """Kill the server so often; return what was accepted and what of it is wrong."""
    killed = Killed(Service(state))
    for number in range(count):
        killed.kill_once(luck.uniform(0.05, 3.0))
        tell(f"kill {number + 1}: {sum(map(len, killed.files.values()))} files")
    with killed.service.running():
        for name in OWNERS:
            killed.check(name, killed.service.client(name))
        temporary = [path.name for path in (state / "files").glob(".*")]
    return {
        "kills": count,
        "files": sum(map(len, killed.files.values())),
        "batches": sum(map(len, killed.batches.values())),
        "wrong": killed.wrong,
        "seen": killed.seen,
        "temporary": temporary,
    }


@dataclass
class Attack:
    """All that a hostile owner may try, until `stop`."""

    client: openai.OpenAI
    victims: Sequence[tuple[str, str]]
    """Files and batches of others."""
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    """How often each thing happened."""

    def guess(self) -> None:
        for file, batch in self.victims:
            for probe in probes(self.client, file, batch):
                self.counts["seen"] += not is_hidden(probe)
                self.counts["probes"] += 1

    def create(self) -> None:
        if self.counts["batches"] % 2:
            begin(self.client, requests_of(HOSTILE, 500, output_tokens=200), engine_s(20, 200))
        else:
            content = requests_of(HOSTILE, 500, output_tokens=1, prompt="word " * 4000)
            begin(self.client, content, engine_s(20_000, 1))
        self.counts["batches"] += 1

    def flood(self) -> None:
        self.client.batches.list(limit=10_000)
        self.client.files.list(limit=10_000)
        self.counts["lists"] += 1

    def upload(self) -> None:
        huge = requests_of(HOSTILE, 20_000, prompt="word " * 100)
        name = self.client.files.create(file=("huge.jsonl", huge), purpose="batch").id
        self.client.files.delete(name)
        self.counts["huge files"] += 1

    def break_form(self) -> None:
        self.counts["broken forms"] += 1
        self.client.post("/files", cast_to=object, body={"a": "b" * 100_000})

    def repeat(self, act: Callable[[], None]) -> None:
        while not self.stop.is_set():
            try:
                act()
            except openai.APIStatusError as refused:
                self.counts[f"{refused.status_code}"] += 1
                self.stop.wait(1.0 if refused.code == RATE_LIMIT else 0.05)
            except openai.APIError as failure:
                self.counts[type(failure).__name__] += 1

    def run(self) -> None:
        """Do everything at once, until `stop`."""
        acts = (self.guess, self.create, self.flood, self.upload, self.break_form)
        threads = [threading.Thread(target=self.repeat, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def engine_s(prompt_characters: int, output_tokens: int) -> float:
    """Return the seconds that a row takes of a full simulated engine."""
    return STEP_S * (output_tokens / MOST_RUNNING + prompt_characters / 4 / PREFILL_TOKENS / 2)


def hostile(seconds: float, state: Path) -> dict[str, Any]:
    """Let one owner attack the others; return what each of them got."""
    limits = {"max_batches": 6, "max_queued_requests": 5000}
    with Service(state, limits=limits).running() as service:
        clients = {name: service.client(name) for name in OWNERS}
        rows = int(3 * seconds * MOST_RUNNING / STEP_S / 20)
        first = {name: begin(clients[name], requests_of(name, rows), engine_s(20, 20)) for name in OWNERS[:2]}
        victims = [(batch.input_file_id, batch.id) for batch in first.values()]
        attack = Attack(clients[HOSTILE], victims)
        attacking = threading.Thread(target=attack.run)
        attacking.start()

        def served_s() -> dict[str, float]:
            totals = dict.fromkeys(OWNERS, 0.0)
            for name in OWNERS:
                for batch in patiently(clients[name].batches.list, limit=10_000):
                    totals[name] += batch.request_counts.completed * float(batch.metadata["row_s"])
            return totals

        time.sleep(WARM_UP_S)
        before = served_s()
        time.sleep(seconds)
        after = served_s()
        attack.stop.set()
        attacking.join()
        served = {name: after[name] - before[name] for name in OWNERS}
        for name in OWNERS[:2]:
            clients[name].batches.cancel(first[name].id)
        lines = Counter[str]()
        for name in OWNERS[:2]:
            last = ended(clients[name], first[name].id)
            text = clients[name].files.content(last.output_file_id).text
            lines["foreign"] += sum(
                not json.loads(line)["custom_id"].startswith(name) for line in text.splitlines()
            )
    whole = sum(served.values())
    shares = {name: round(3 * spent / whole, 3) for name, spent in served.items()}
    return {"seconds": seconds, "shares": shares, "attacks": attack.counts, "foreign_lines": lines["foreign"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-owners-") as scratch:
        killed = kills(args.kills, random.Random(args.seed), Path(scratch) / "killed")
        tell(json.dumps(killed))
        attacked = hostile(args.seconds, Path(scratch) / "attacked")
        tell(json.dumps(attacked))
    least = min(attacked["shares"][name] for name in OWNERS[:2])
    is_good = least >= GOAL and not (
        killed["wrong"] or killed["seen"] or killed["temporary"]
        or attacked["attacks"]["seen"] or attacked["foreign_lines"]
    )  # fmt: skip
    line = (
        f"serve with owners: {killed['kills']} kills, {killed['files']} files and {killed['batches']} "
        f"batches accepted, {len(killed['wrong'])} wrong, {len(killed['seen'])} seen by others; "
        f"under an attack of {args.seconds:.0f} s each of the others got at least {least:.2f} of its share"
    )
    save(
        "serve_owners",
        line,
        {"goal_met": is_good, "kills": killed, "hostile": attacked},
        ("batchrunner", "openai"),
    )
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
