"""Results of a batch file, in OpenAI's format."""

import json
from pathlib import Path

from batchrunner.output.batch_results import CANCELLED, EXPIRED, publish
from batchrunner.output.run_dir import RunDir


def test_a_batch_that_ended_before_its_run(tmp_path: Path) -> None:
    """Each request fails with the reason of the end or its own error; a second time makes equal lines."""
    results, errors = tmp_path / "results.jsonl", tmp_path / "errors.jsonl"
    unanswered = [("a", CANCELLED), (None, "line 2: not a request"), ("c", EXPIRED)]
    published = publish(RunDir(tmp_path / "run"), results, errors, unanswered=unanswered)
    assert published is not None
    assert (published.completed, published.failed, published.usage["total_tokens"]) == (0, 3, 0)
    assert results.read_bytes() == b""
    first = errors.read_bytes()
    lines = [json.loads(line) for line in first.splitlines()]
    assert [(line["custom_id"], line["error"]["code"], line["response"]) for line in lines] == [
        ("a", "batch_cancelled", None), (None, "invalid_request", None), ("c", "batch_expired", None)
    ]  # fmt: skip
    assert len({line["id"] for line in lines}) == 3
    publish(RunDir(tmp_path / "run"), results, errors, unanswered=unanswered)
    assert errors.read_bytes() == first
