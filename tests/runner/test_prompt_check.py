"""`check` tries prompts on the files of the model: its chat template and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import batchrun, job_of, printed, write_job, write_rows
from tests.support.tiny_tokenizer import CHATML, make_tokenizer

ALTERNATE = """{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALLS = [{"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"city": "Bern"}'}}]
CONVERSATION = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "There."},
]
CHAT = {"user": "{{ text }}"}


def job_on(directory: Path, template: str | None, prompt: dict[str, Any], **changes: Any) -> Path:
    """Return the file of a job on a model with this chat template."""
    make_tokenizer(directory / "model", template)
    engine = {"kind": "server", "model": str(directory / "model"), **changes.pop("engine", {})}
    return write_job(job_of(directory, engine, rows=2, prompt=prompt, **changes), directory)


FAILING = [
    ("{{ 'a' + 1 }}", CHAT, 'chat template: can only concatenate str (not "int") to str'),
    ("{{ messages | nobody }}", CHAT, "the chat template cannot be compiled: No filter named 'nobody'."),
    (ALTERNATE, {"system": "Be brief.", **CHAT}, "chat template: roles must alternate"),
    ("{{ tools[0].function.name }}", CHAT, "chat template: None has no element 0"),
    (
        "{{ messages[0].content.nothing.more }}",
        {**CHAT, "tools": [TOOL]},
        "chat template: 'str object' has no attribute 'nothing'",
    ),
]


@pytest.mark.parametrize(("template", "prompt", "why"), FAILING)
def test_a_chat_template_that_fails(tmp_path: Path, template: str, prompt: dict[str, Any], why: str) -> None:
    """Rows of which the model's template makes no prompt cannot be sent, and `check` says why."""
    file = job_on(tmp_path, template, prompt)
    done = batchrun("check", file)
    assert done.exit_code == 3
    assert f"cannot be sent: 2 rows: {why}" in done.stdout
    assert "none of the first 2 rows can be sent: correct the prompt or the data" in done.stdout


PASSING = [
    (CHATML, {"system": "Be brief.", **CHAT}),
    ("{{ tools[0].function.name }}{{ tools[0].function.description | tojson }}", {**CHAT, "tools": [TOOL]}),
    ("{{ tools[0].name | tojson }}", {**CHAT, "tools": [TOOL]}),
    ("{{ messages[1].tool_calls[0].function.arguments.city | tojson }}", {"messages": "talk"}),
    (ALTERNATE, {"messages": "talk"}),
    ("{{ enable.thinking }}", {**CHAT, "chat_template_kwargs": {"enable": {"thinking": True}}}),
]


@pytest.mark.parametrize(("template", "prompt"), PASSING)
def test_a_chat_template_that_takes_the_rows(tmp_path: Path, template: str, prompt: dict[str, Any]) -> None:
    """Tools and calls of tools are given to it as SGLang gives them."""
    write_rows(tmp_path / "input.parquet", 2, talk=[json.dumps(CONVERSATION)] * 2)
    done = batchrun("check", job_on(tmp_path, template, prompt))
    assert done.exit_code == 0
    assert "the job is fine; nothing was sent" in done.stdout


OWN_RULES = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
UNKNOWN = [
    (None, {}, "chat prompts, because there is no chat template among the files of"),
    (
        "{{ 1 / 0 }}",
        {"args": {"chat-template": "other.jinja"}},
        "chat prompts, because engine.args.chat-template changes how SGLang builds them",
    ),
]


@pytest.mark.parametrize(("template", "engine", "says"), UNKNOWN)
def test_a_chat_template_that_is_not_known(
    tmp_path: Path, template: str | None, engine: dict[str, Any], says: str
) -> None:
    """What only the server knows is not judged, and `check` says so."""
    done = batchrun("check", job_on(tmp_path, template, CHAT, engine=engine))
    assert done.exit_code == 0
    assert f"not checked: {says}" in done.stdout
    assert "everything else is fine; nothing was sent" in done.stdout


def test_a_model_whose_chats_sglang_writes_itself(tmp_path: Path) -> None:
    """Its chat template is not asked."""
    file = job_on(tmp_path, "{{ 1 / 0 }}", CHAT)
    (tmp_path / "model" / "config.json").write_text(json.dumps(OWN_RULES))
    done = batchrun("check", file)
    assert done.exit_code == 0
    assert (
        "not checked: chat prompts, because SGLang has its own rules for the chat prompts of deepseek_v4"
        in done.stdout
    )


def test_requests_of_a_batch_file(tmp_path: Path) -> None:
    """Their chats are tried too."""
    make_tokenizer(tmp_path / "model", ALTERNATE)
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": "Hello"}]} for role in ("user", "system")
    ]
    lines = [
        {
            "custom_id": str(at),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", **body},
        }
        for at, body in enumerate(bodies)
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = json.dumps({"kind": "server", "model": str(tmp_path / "model")})
    found = printed("check", requests, "--set", f"engine={engine}")
    assert [prompt["error"] for prompt in found["prompts"]] == [None, "chat template: roles must alternate"]


@pytest.mark.parametrize(("prompt", "begins_twice"), [("<s>Hello {{ text }}", 2), ("Hello {{ text }}", 0)])
def test_a_token_that_begins_prompts_twice(tmp_path: Path, prompt: str, begins_twice: int) -> None:
    """A text that begins with the token that the tokenizer adds is a warning; in a chat nothing is added."""
    file = job_on(tmp_path, "<s>" + CHATML, {"text": prompt})
    found = printed("check", file)
    told = f"{begins_twice} prompts begin with <s>, which the tokenizer adds as well"
    assert [warning.startswith(told) for warning in found["warnings"]] == [True] * (begins_twice > 0)
    verdict = "the rows can be sent, with a warning" if begins_twice else "the job is fine"
    assert f"{verdict}; nothing was sent" in batchrun("check", file).stdout
    assert printed("check", job_on(tmp_path, "<s>" + CHATML, CHAT))["warnings"] == []
