"""The real SGLang, out of memory in mid-run: it comes back with safer arguments, and no row is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrunner.engines.device import has_gpu
from batchrunner.output.events import read_events
from tests.conftest import SMALL_MODEL, eventually, report_of, require_engine, results_of, write_job
from tests.support.engine_processes import START_S
from tests.support.tiny_model import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    require_engine("sglang")


FOR_A_CARD = {"hidden": 1024, "layers": 4, "head": 64}
"""32 kB a token, with heads that a card's attention backends know."""


def long_rows_job(
    directory: Path, shape: dict[str, int], words: list[int], *, tokens: int, **engine: Any
) -> dict[str, Any]:
    """Return a job on a model of this shape, with rows of so many words; no two begin alike."""
    model = make_tiny_llama(directory / "model", SMALL_MODEL, **shape)
    texts = [" ".join(str(row * n % 997) for n in range(1, count)) for row, count in enumerate(words, 2)]
    pq.write_table(pa.table({"text": [f"{n}: {text}" for n, text in enumerate(texts)]}), directory / "rows")
    return {
        "input": {"path": str(directory / "rows")},
        "prompt": {"text": "text"},
        "sampling": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "order": "input",
        "output": {"path": str(directory / "run")},
        "engine": {"kind": "server", "model": str(model), **engine},
    }


def whole(job: dict[str, Any], rows: int) -> bool:
    """Tell whether every row is there once, and answered."""
    results = results_of(job)
    return [row["row"] for row in results] == list(range(rows)) and not any(row["error"] for row in results)


def rows_done(directory: Path) -> int:
    samples = [e for e in read_events(directory / "run" / "events.jsonl") if e["event"] == "sample"]
    return int(samples[-1]["rows_done"]) if samples else 0


HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hog(leaves_bytes: int) -> Iterator[None]:
    """Hold all of the card's free memory but this, as another user of it may."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(leaves_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "holds"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="skipped: no GPU")
@pytest.mark.parametrize(
    ("kind", "words", "tokens", "flag"),
    [
        # short prompts, then long ones: a pass of 16,384 tokens wants more than all passes before
        ("prefill", [20] * 64 + [1500] * 400, 4, "chunked-prefill-size"),
        # ever more run at once: the logits of a decode step, 200 kB a row, want more than any pass before
        ("decode", [8] * 4000, 400, "max-running-requests"),
    ],
)
def test_out_of_memory_on_a_card(tmp_path: Path, kind: str, words: list[int], tokens: int, flag: str) -> None:
    """A card that another process fills in mid-run: the guides' step for that pass, and every row once."""
    args = {
        "mem-fraction-static": 0.5, "chunked-prefill-size": 16384, "disable-cuda-graph": True,
        "max-running-requests": 2048,
    }  # fmt: skip
    job = long_rows_job(tmp_path, FOR_A_CARD, words, tokens=tokens, device="cuda", args=args)
    command = [sys.executable, "-m", "batchrunner", str(write_job(job, tmp_path))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
        eventually(lambda: rows_done(tmp_path) >= 1 or process.poll() is not None, START_S)
        log = tmp_path / "run" / "events.jsonl"
        with hog(64 << 20):
            eventually(lambda: '"engine_died"' in log.read_text() or process.poll() is not None, START_S)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, errors[-4000:]
    assert whole(job, len(words))
    healed = [told for told in report_of(job)["incidents"] if told["what"] == "healed"]
    assert healed[0]["kind"] == kind, json.dumps(healed)
    assert flag in healed[0]["new"]
