"""Which engine a job means, and its model."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from batchrunner.core.errors import (
    JobError,
)
from batchrunner.engines import registry
from batchrunner.engines.registry import bound_blanks, for_task
from batchrunner.job.engine import ServerEngine
from batchrunner.job.load import parse_engine


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "gateway"}, "url is missing"),
        ({"kind": "gateway", "url": "http://a", "tp": 2}, "unknown key 'tp'"),
        ({"kind": "server", "model": "a", "nodes": 2, "replicas": 2}, "leave out `replicas`"),
        (
            {"kind": "server", "model": "a", "tp": 2, "args": {"tp_size": 2}},
            "engine.tp and --tp-size",
        ),
        (
            {"kind": "server", "model": "a", "args": {"--max_running_requests=4": True}},
            "max-running-requests=4: write the value after a colon",
        ),
        ({"kind": "server", "model": "a", "args": {"--api_key": "a"}}, "batchrunner sets --api-key itself"),
    ],
)
def test_wrong_jobs(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        parse_engine(engine)


@pytest.mark.parametrize(
    ("architecture", "mean", "args", "env"),
    [
        ("BertModel", True, {"disable-radix-cache": True, "chunked-prefill-size": -1}, {"mean_pooling"}),
        ("BertModel", False, {"disable-radix-cache": True, "chunked-prefill-size": -1}, set()),
        ("Qwen3ForCausalLM", False, {}, set()),
    ],
)
def test_a_server_for_embeddings(
    tmp_path: Path, architecture: str, mean: bool, args: dict[str, Any], env: set[str]
) -> None:
    """A launched server gets what its model needs for the task, below the job's own arguments."""
    (tmp_path / "config.json").write_bytes(orjson.dumps({"architectures": [architecture]}))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": mean}
    (tmp_path / "1_Pooling" / "config.json").write_bytes(orjson.dumps(pooling))
    own = {"mem-fraction-static": 0.7}
    spec = {"kind": "server", "model": str(tmp_path), "device": "cpu", "args": own}
    given = parse_engine(spec)
    made = for_task(given, "embed").model_dump()
    on_a_cpu = {"context-length": None, "max-running-requests": 256}
    assert made["args"] == {"is-embedding": True, **on_a_cpu, **args, **own}
    assert set(made["env"].values()) == env
    assert for_task(given, "generate") == given


@pytest.mark.parametrize(
    ("version", "own", "blanks"),
    [
        ("0.5.23", {}, 64),
        ("0.6.0rc1", {}, 64),
        ("0.5.23", {"constrained_json_max_whitespace_cnt": 8}, 8),
        ("0.5.16", {}, None),
        (None, {}, None),
    ],
)
def test_json_is_not_padded_without_end(
    version: str | None, own: dict[str, Any], blanks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that the run starts bounds the blanks in JSON where its version can; the job's bound stays."""
    monkeypatch.setattr(registry, "version_of", lambda *_: version)
    spec = parse_engine({"kind": "server", "model": "m", "args": own})
    assert isinstance(spec, ServerEngine)
    assert bound_blanks(spec).args.get("constrained-json-max-whitespace-cnt") == blanks
