"""What was learned is read as it was written, by several processes, and whatever is damaged."""

from pathlib import Path

import pytest

from batchrunner.tuning.memory import FlagMemory, Memory, SaferFlags, recall_safer_flags
from batchrunner.tuning.recover import Healer


def flag_memory(file: Path, shape: str = "shape") -> FlagMemory:
    return FlagMemory(Memory(file), shape, [])


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"kind": "safer", "about": "", "content": {"args": 5}}',
        '{"kind": "step", "about": "shape", "content": {"name": "a step", "gain": "much", "args": {"a": 1}}}',
        '{"kind": "step", "about": "shape", "content": {"name": "a st',
    ],
)
def test_what_was_learned_is_damaged(tmp_path: Path, content: str) -> None:
    """A damaged line does not count, and what is learned after it does."""
    file = tmp_path / "learned.jsonl"
    file.write_text(content)
    memory = flag_memory(file)
    assert (memory.args, memory.gains, Healer({}, Memory(file), []).args) == ({}, {}, {})
    memory.learn("a step", 0.5, {"a": 2})
    assert (flag_memory(file).args, flag_memory(file).gains) == ({"a": 2}, {"a step": 0.5})


def test_memos_of_another_kind_or_about_something_else_do_not_count(tmp_path: Path) -> None:
    """One file has the safer flags of a model, and the steps of each shape of job."""
    file = tmp_path / "learned.jsonl"
    flag_memory(file).learn("a step", 0.5, {"a": 2})
    assert recall_safer_flags(Memory(file)) is None
    assert flag_memory(file, "another shape").args == {}
    Memory(file).append("safer", SaferFlags({"b": 1}, "a death"))
    Memory(file).append("safer", SaferFlags({"b": 2}, "another death"))
    assert recall_safer_flags(Memory(file)) == SaferFlags({"b": 2}, "another death")
    assert flag_memory(file).args == {"a": 2}


def test_the_newest_trial_of_a_step_counts(tmp_path: Path) -> None:
    """A step that loses later is not begun with; the flags of other steps stay."""
    memory = flag_memory(tmp_path / "learned.jsonl")
    memory.learn("a", 0.5, {"x": 1})
    memory.learn("b", 0.2, {"y": 1})
    memory.learn("a", -0.1)
    again = flag_memory(tmp_path / "learned.jsonl")
    assert (again.args, again.gains) == ({"y": 1}, {"b": 0.2, "a": -0.1})


def test_flags_that_no_server_lives_with_are_forgotten(tmp_path: Path) -> None:
    """None of their steps is tried again; what had lost before stays as it was."""
    memory = flag_memory(tmp_path / "learned.jsonl")
    memory.learn("a", 0.5, {"x": 1})
    memory.learn("b", -0.2)
    memory.forget()
    again = flag_memory(tmp_path / "learned.jsonl")
    assert (again.args, again.gains) == ({}, {"b": -0.2, "a": -1.0})


def test_a_run_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    """What it learned counts until its end."""
    (tmp_path / "file").write_text("")
    memory = flag_memory(tmp_path / "file" / "learned.jsonl")
    memory.learn("a", 0.5, {"x": 1})
    assert memory.gains == {"a": 0.5}
