"""The description of replicas, from what each says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import EngineStartError
from batchrunner.engines.http.model_guard import common_model
from batchrunner.engines.http.server_info import describe, pooling_note, prefill_tokens
from tests.support.reader_checks import check_description, json_of, some_odd

MODEL = {"model_path": "org/model"}
SERVER: dict[str, Any] = {
    "version": "0.5.23", "sampling_defaults": "model", "max_running_requests": None,
    "max_total_num_tokens": 1000, "context_length": 4096, "chunked_prefill_size": 512,
    "internal_states": [{"effective_max_running_requests_per_dp": 8, "max_total_num_tokens": 700}] * 2,
}  # fmt: skip


def test_limits_are_summed_over_schedulers() -> None:
    """Those of a polled load come first; a sum without one of its parts would be too small."""
    loads = [SchedulerLoad(f"#dp{rank}", "loads", 0, 0, 0.0, max_running=5) for rank in range(2)]
    info = describe([MODEL, MODEL], [SERVER, SERVER], loads)
    assert (info.max_running, info.max_total_tokens) == (10, 2000)
    assert (info.model, info.version, info.context_length) == ("org/model", "0.5.23", 4096)
    silent = {**SERVER, "max_total_num_tokens": None}
    assert describe([MODEL, MODEL], [SERVER, silent], []).max_total_tokens is None


def test_replicas_of_two_models_are_refused() -> None:
    with pytest.raises(EngineStartError, match="serve different models: the model is a and b"):
        common_model([{"model_path": "b"}, {"model_path": "a"}])


def test_replicas_that_tokenize_in_two_ways_do_it_themselves() -> None:
    """Tokens that the client made would be right for one of them only."""
    alike = describe([MODEL, MODEL], [SERVER, SERVER], []).tokenizing
    assert alike is not None
    assert (alike.own, alike.model_sampling) == (None, True)
    other = describe([MODEL, MODEL], [SERVER, {**SERVER, "tokenizer_path": "org/other"}], []).tokenizing
    assert other is not None
    assert other.own == "the replicas' arguments differ"


def test_lpm_is_noted() -> None:
    (note,) = describe([MODEL], [{**SERVER, "schedule_policy": "lpm"}], []).notes
    assert "fcfs keeps it" in note


def test_a_prefill_pass_takes_the_smaller_limit() -> None:
    assert prefill_tokens({"chunked_prefill_size": 512, "max_prefill_tokens": 256}) == 256
    assert prefill_tokens({"chunked_prefill_size": -1, "max_prefill_tokens": 256}) == 256
    assert prefill_tokens({}) is None


@given(some_odd([{**SERVER, **MODEL, "served_model_name": "m", "weight_version": "v", "workers": [
    {"url": "http://a", "connection_mode": "HTTP"}]}]))  # fmt: skip
def test_any_description_can_be_read(found: Any) -> None:
    """Whatever a server says of itself is used where it makes sense."""
    check_description(json_of(found))


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([{"image": True, "audio": False}], (True, False, None)),
        ([{"image": False, "audio": True}], (False, True, False)),
        ([{"image": True, "audio": True}, {"image": True, "audio": False}], (True, False, None)),
        ([{"image": "yes", "audio": 1}], (None, None, None)),
    ],
)
def test_media_taken(models: list[dict[str, Any]], expected: tuple[Any, ...]) -> None:
    """Each kind as the servers say, in all of them; what takes no images takes no videos."""
    told = [
        {**MODEL, **{f"has_{kind}_understanding": does for kind, does in model.items()}} for model in models
    ]
    info = describe(told, [SERVER] * len(models), [])
    assert (info.takes_images, info.takes_audio, info.takes_videos) == expected


@pytest.mark.parametrize(
    ("mean", "pooling", "is_told"), [(True, "cls", True), (True, "mean", False), (False, "cls", False)]
)
def test_a_server_that_makes_vectors_otherwise(
    tmp_path: Path, mean: bool, pooling: str, is_told: bool
) -> None:
    """A line says so where the model's files and the server are known to differ."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": mean}))
    note = pooling_note({"model_path": str(tmp_path), "embedding": {"pooling": pooling}})
    assert ("of the first token" in (note or "")) == is_told
    assert pooling_note({"model_path": str(tmp_path), "embedding": [pooling]}) is None
