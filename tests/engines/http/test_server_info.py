"""The description of replicas, from what each says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from batchrunner.core.engine_info import SchedulerLoad
from batchrunner.core.errors import EngineStartError
from batchrunner.engines.http.model_guard import common_model
from batchrunner.engines.http.server_info import describe, prefill_tokens
from tests.support.json_values import json_of, some_odd
from tests.support.reader_checks import check_description

MODEL = {"model_path": "org/model"}
SERVER: dict[str, Any] = {
    "version": "0.5.23", "sampling_defaults": "model", "max_running_requests": None,
    "max_total_num_tokens": 1000, "context_length": 4096, "chunked_prefill_size": 512,
    "internal_states": [{"effective_max_running_requests_per_dp": 8, "max_total_num_tokens": 700}] * 2,
}  # fmt: skip


def test_limits_in_effect_are_summed_over_schedulers() -> None:
    """Each of two ranks of two replicas has its own limits; the arguments may be null, or another number."""
    info = describe([MODEL, MODEL], [SERVER, SERVER], [])
    assert (info.max_running, info.max_total_tokens) == (32, 2800)
    assert (info.model, info.version, info.context_length) == ("org/model", "0.5.23", 4096)


def test_a_polled_load_has_the_limits_first() -> None:
    """What all schedulers report with their load goes before what the servers say of themselves."""
    loads = [SchedulerLoad(f"#dp{rank}", "loads", 0, 0, 0.0, max_running=5) for rank in range(2)]
    info = describe([MODEL], [SERVER], loads)
    assert (info.max_running, info.max_total_tokens) == (10, 1400)


def test_a_limit_that_one_server_does_not_say_is_not_known() -> None:
    """A sum without one of its parts would be too small."""
    silent = {**SERVER, "internal_states": None, "max_total_num_tokens": None}
    info = describe([MODEL, MODEL], [SERVER, silent], [])
    assert (info.max_running, info.max_total_tokens) == (None, None)


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


def _model(*, images: object = None, audio: object = None, architecture: str = "Any") -> dict[str, Any]:
    return {
        **MODEL,
        "has_image_understanding": images,
        "has_audio_understanding": audio,
        "architectures": [architecture],
    }


_PIXTRAL = _model(images=True, architecture="PixtralForConditionalGeneration")


@pytest.mark.parametrize(
    ("models", "version", "expected"),
    [
        ([_model(images=True, audio=False)], "0.5.23", (True, False, None)),
        ([_model(images=False, audio=True)], "0.5.23", (False, True, False)),
        ([_model(images=True, audio=True), _model(images=True, audio=False)], None, (True, False, None)),
        ([MODEL], "0.4.0", (None, None, None)),
        ([_model(images="yes", audio=1)], "0.5.23", (None, None, None)),
        (
            [_PIXTRAL],
            "0.5.23",
            (True, None, False),
        ),
        ([_PIXTRAL], "0.6.0", (True, None, None)),
        ([_PIXTRAL], "main", (True, None, None)),
        ([{**_model(images=True), "architectures": None}], "0.5.23", (True, None, None)),
    ],
)
def test_media_taken(models: list[dict[str, Any]], version: str | None, expected: tuple[Any, ...]) -> None:
    """Each kind as the servers say, in all of them; videos need a part for images, and a reader of videos."""
    info = describe(models, [{**SERVER, "version": version}] * len(models), [])
    assert (info.takes_images, info.takes_audio, info.takes_videos) == expected
