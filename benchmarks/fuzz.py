"""Can bytes from a server end a run? Coverage-guided fuzzing of all that reads them, with atheris.

Each reader gets mutations of good replies for `--seconds` in a process of its own: answers, errors, loads and
descriptions, checked by `tests.support.reader_checks`. A finding is printed with its traceback, and its input
is kept in `--keep`. atheris is optional (`pip install atheris`); without it nothing is done here, and the
properties in tests/engines/http are tried by hypothesis alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

META = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2, "weight_version": "v"}
SAMPLE = {"text": "caf\u00e9 \ud83d\ude00", "meta_info": META}
CHAT = {
    "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "meta_info": META}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}
ABORT = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "status_code": 400, "message": "m"}}}
LOAD = {
    "dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 1, "token_usage": 0.1,
    "max_total_num_tokens": 20000, "max_running_requests": 8, "timestamp": 1.5, "total_prefill_busy_us": 5,
}  # fmt: skip
METRICS = "".join(
    f'# TYPE sglang:{name} gauge\nsglang:{name}{{tp_rank="0",dp_rank="0"}} 3.0\n'
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage")
)
SERVER = {
    "version": "0.5.23", "context_length": 4096, "internal_states": [{"max_running_requests": 8}],
    "sampling_defaults": "model", "workers": [{"url": "http://a", "connection_mode": "HTTP"}],
}  # fmt: skip
SEEDS: dict[str, list[Any]] = {
    "answers": [
        SAMPLE,
        [SAMPLE, SAMPLE],
        CHAT,
        ABORT,
        {"tokens": [1, 2]},
        r'{"text": "\ud800", "meta_info": {}}',
    ],
    "events": [
        {**SAMPLE, "index": 1},
        {**ABORT, "index": 0},
        {"error": {"message": "m", "code": 400}},
        json.dumps({**SAMPLE, "index": 2}) + "\n" + json.dumps({**SAMPLE, "index": 2}),
    ],
    "errors": [{"error": {"code": "no_workers", "message": "m"}}, {"detail": ["d"]}, "Internal Server Error"],
    "loads": [{"loads": [LOAD]}, {"loads": [LOAD, {**LOAD, "dp_rank": 1}]}, METRICS],
    "descriptions": [{**SERVER, "model_path": "m", "weight_version": "v"}],
}
RETRY_AFTER = (None, "5", "\u00b2", "")


def target(reader: str) -> Callable[[bytes], None]:
    """Return what reads bytes; the first byte chooses between the ways to read them."""
    from tests.support import reader_checks as checks  # noqa: PLC0415 - atheris instruments what is imported

    def answers(data: bytes) -> None:
        way, reply = data[:1] or b"\0", data[1:]
        checks.check_answer(reply, checks.KINDS[way[0] % 3], (1, 2, 4)[way[0] // 3 % 3])

    def errors(data: bytes) -> None:
        way, reply = data[:1] or b"\0", data[1:]
        checks.check_error((500, 503, 400, 429, 599)[way[0] % 5], reply, RETRY_AFTER[way[0] // 5 % 4])

    def loads(data: bytes) -> None:
        checks.check_load(data[1:])

    def descriptions(data: bytes) -> None:
        checks.check_description(data[1:])

    def events(data: bytes) -> None:
        checks.check_bundle(data.split(b"\n"), 4)

    return {
        "answers": answers,
        "events": events,
        "errors": errors,
        "loads": loads,
        "descriptions": descriptions,
    }[reader]


def fuzz(reader: str, options: list[str]) -> None:
    """Fuzz one reader in this process, which libFuzzer ends."""
    import atheris  # noqa: PLC0415 - optional

    with atheris.instrument_imports(include=["batchrunner.engines", "tests.support"]):
        read = target(reader)
    atheris.Setup([sys.argv[0], *options], read)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="time for each reader")
    parser.add_argument("--reader", choices=SEEDS, help="one reader only")
    parser.add_argument("--keep", type=Path, default=Path("out/fuzz"), help="directory of the findings")
    arguments, rest = parser.parse_known_args()
    if rest:
        fuzz(arguments.reader, rest)
        return 0
    if find_spec("atheris") is None:
        print("atheris is not installed: hypothesis alone tries what reads a server's bytes")
        return 0
    arguments.keep.mkdir(parents=True, exist_ok=True)
    failed = []
    for reader in [arguments.reader] if arguments.reader else SEEDS:
        with tempfile.TemporaryDirectory() as corpus:
            for number, seed in enumerate(SEEDS[reader]):
                text = seed if isinstance(seed, str) else json.dumps(seed)
                for way in range(9 if reader == "answers" else 1):
                    Path(corpus, f"{number}-{way}").write_bytes(bytes([way]) + text.encode())
            kept = f"-artifact_prefix={arguments.keep}/{reader}-"
            options = [corpus, f"-max_total_time={arguments.seconds}", kept]
            print(f"{reader}: {arguments.seconds} s", flush=True)
            command = [sys.executable, "-m", "benchmarks.fuzz", "--reader", reader, *options]
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            if ended.returncode:
                failed.append(reader)
                print(ended.stdout or "", ended.stderr[-8000:])
            else:
                print(ended.stderr.strip().rpartition("\n")[2])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
