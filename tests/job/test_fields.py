"""`engine.model`: what a model can be named, and what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from batchrunner.job.load import parse_engine
from batchrunner.sglang.model_files import check_model

NAMES = [
    "gpt2",
    "Qwen/Qwen3-8B",
    "01-ai/Yi-1.5_6B",
    "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
]


def of(engine: Any) -> Any:
    """Return an engine from the `engine` part of a job, or a short form."""
    return parse_engine(engine)


@pytest.mark.parametrize("name", NAMES)
def test_names_on_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks for them: nothing of that name need be here."""
    monkeypatch.chdir(tmp_path)
    assert of({"kind": "server", "model": name}).model == of(name).model == name
    check_model(name)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may have any name; one that is on other machines alone is written as a path."""
    monkeypatch.chdir(tmp_path)
    for name in ("my model", "a:1", "models/a b"):
        Path(name).mkdir(parents=True)
        assert of({"kind": "server", "model": name}).model == name
    for elsewhere in ("./my other model", "/mnt/my other model", "../a:b"):
        assert of({"kind": "server", "model": elsewhere}).model == elsewhere
    assert of(Path("my model")).model == "my model"
    assert of(Path("nothing")).model == "./nothing", "a path is no name on the Hub"
