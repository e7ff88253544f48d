"""Batch files as people have them: odd encodings, odd bodies, huge lines, results in odd places."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.test_batch_files import Batch, lines_of, request_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fake_sglang import FakeSGLang

LINES = [json.dumps(request_of(number)).encode() for number in range(3)]


WRITTEN: dict[str, bytes] = {
    "bom.jsonl": b"\xef\xbb\xbf" + b"\n".join(LINES),
    "crlf.jsonl": b"\r\n".join(LINES) + b"\r\n",
    "blank.jsonl": b"\n\n \t\n" + b"\n\n\n".join(LINES) + b"\n \n",
    "packed.jsonl.gz": gzip.compress(b"\n".join(LINES)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_files_that_other_programs_write(tmp_path: Path, server: FakeSGLang, name: str) -> None:
    """Byte order marks, Windows line ends, blank lines and compression change nothing."""
    batch = Batch(tmp_path, [])
    batch.requests = tmp_path / name
    batch.requests.write_bytes(WRITTEN[name])
    assert batch.do("--errors", batch.errors, engine=server).exit_code == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == [f"request-{n}" for n in range(3)]
    assert lines_of(batch.errors) == []


BROKEN: dict[str, tuple[bytes, str]] = {
    "utf16.jsonl": (
        "\n".join(map(bytes.decode, LINES)).encode("utf-16"),
        "line 1: not a request: 'utf-8'",
    ),
    "empty.jsonl.gz": (gzip.compress(b""), "no line is a JSON object"),
    "cut.jsonl.gz": (gzip.compress(b"\n".join(LINES * 50))[:-20], "not a readable JSON Lines file"),
    "pretty.jsonl": (b"[\n" + b",\n".join([*LINES, b"{}"]) + b"\n]", "line 1: not a request: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_hold_no_requests(tmp_path: Path, name: str) -> None:
    """One line says so, and nothing is written."""
    content, told = BROKEN[name]
    batch = Batch(tmp_path, [])
    batch.requests = tmp_path / name
    batch.requests.write_bytes(content)
    result = batch.do()
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert told in result.stderr
    assert not batch.run.exists()


def test_a_huge_line_and_a_long_custom_id(tmp_path: Path, server: FakeSGLang) -> None:
    """They go in and come out as any other."""
    long_id, long_text = "i" * 1_000_000, "x " * 5_000_000
    lines = [request_of(0), {**request_of(1), "custom_id": long_id}, request_of(2)]
    lines[2]["body"]["messages"][0]["content"] = long_text
    batch = Batch(tmp_path, lines)
    assert batch.do(engine=server).exit_code == 0
    assert [line["custom_id"] for line in lines_of(batch.results)] == ["request-0", long_id, "request-2"]
    assert [line["error"] for line in lines_of(batch.results)] == [None] * 3
    assert long_text in {sent.prompt for sent in server.sent}


def test_published_again(tmp_path: Path) -> None:
    """Results that were deleted or changed since are those of the run again; errors may go elsewhere."""
    batch = Batch(tmp_path, [request_of(number) for number in range(4)])
    batch.requests.write_text(batch.requests.read_text() + '{"custom_id": "bad"}\n')
    assert batch.do().exit_code == 0
    whole = batch.results.read_bytes()
    batch.results.unlink()
    assert batch.do().exit_code == 0
    assert batch.results.read_bytes() == whole
    batch.results.write_bytes(whole[:100])
    assert batch.do("--errors", batch.errors).exit_code == 0
    assert batch.results.read_bytes() + batch.errors.read_bytes() == whole
