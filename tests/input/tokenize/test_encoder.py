"""Tokens made on the client: the same as SGLang's, or none; prompts that are too long are cut to fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Request
from batchrunner.input.tokenize.encoder import Encoder, TokenBudget, Truncation
from tests.conftest import SMALL_MODEL, require_engine
from tests.support.tiny_tokenizer import CHATML, make_tokenizer
from tests.support.tokenizers import ids_of, messages, request


@given(text=st.text(max_size=200))
@example(text="")
@example(text="👩\u200d👩\u200d👧 e\u0301\r\n\t  <s></s><|im_end|> \ufeff")
@example(text="x" * 1_000_000)
def test_any_text_becomes_the_tokens_that_transformers_makes(text: str, directory: Path) -> None:
    """Plain prompts and messages of any text, of a million characters too, become the server's tokens."""
    require_engine("transformers")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    theirs = AutoTokenizer.from_pretrained(directory)
    assert ids_of(directory, request(text, "text")) == theirs(text)["input_ids"]
    chat = messages(("user", text))
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = theirs.encode(rendered, add_special_tokens=False)
    assert ids_of(directory, request(chat)) == expected


@given(
    text=st.text(min_size=1, max_size=300),
    room=st.integers(-5, 120),
    cut=st.sampled_from(["head", "tail", "middle"]),
)
def test_what_is_cut_fits_and_leaves_the_template(
    text: str, room: int, cut: Truncation, directory: Path
) -> None:
    """Whatever the text, what comes out has room and its template whole, or the row says why not."""
    encoder = Encoder("messages", directory, TokenBudget(room + 10), cut)
    prompt = messages(("system", "S"), ("user", text))
    (done,) = encoder.encode([request(prompt, max_new_tokens=10)])
    if not isinstance(done, Request):
        assert "prompt.truncate: the prompt has" in str(done.error)
        return
    assert len(done.prompt) <= room
    whole = ids_of(directory, request(prompt))
    assert isinstance(whole, list)
    before = ids_of(directory, request(messages(("system", "S"), ("user", ""))))
    assert isinstance(before, list)
    assert len(whole) <= room or len(done.prompt) < len(whole)
    assert done.prompt[:4] == whole[:4]
    assert done.prompt[-4:] == before[-4:]


TEMPLATES = {
    "chatml": CHATML,
    "llama 3": (
        "{{- bos_token }}\n{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
        "    {{- message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}\n"
        "{% for message in messages %}\n"
        "    {% set role = 'model' if message.role == 'assistant' else message.role %}\n"
        "<start_of_turn>{{ role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}\n"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "qwen": (
        "{%- for message in messages %}\n{{- '<|im_start|>' + message.role + '\\n' }}\n"
        "{%- generation %}{{- message.content }}{%- endgeneration %}{{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}\n"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    "deepseek": (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content %}{% continue %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<\uff5cUser\uff5c>' ~ m.content }}{% elif m.role == 'assistant' %}"
        "{{ '<\uff5cAssistant\uff5c>' ~ m.content.split('</think>')[-1] ~ eos_token }}{% endif %}{% endfor %}"
        "{{ '<\uff5cAssistant\uff5c>' if add_generation_prompt }}{{ messages[:1] | tojson(indent=1) }}"
    ),
}
CHATS = {
    "one": [("user", " What's <b>up</b> & 'why'? ")],
    "system": [("system", "Be brief."), ("user", "Grüezi 👩\u200d👧")],
    "turns": [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d\n\n  e")],
    "wrong": [("user", "a"), ("user", "b")],
}


@pytest.mark.parametrize("arguments", [None, {"enable_thinking": False}], ids=["", "no thinking"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", [*TEMPLATES, "smollm2's own"])
def test_a_chat_becomes_the_tokens_that_transformers_makes(
    family: str, chat: str, arguments: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Templates of all families give token for token what the server's library gives, or refuse alike."""
    require_engine("transformers")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    model = make_tokenizer(tmp_path, TEMPLATES[family]) if family in TEMPLATES else SMALL_MODEL
    prompt = messages(*CHATS[chat])
    theirs: Any
    try:
        theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **(arguments or {})
        )
    except Exception as failure:  # noqa: BLE001 - jinja2's, whichever it is
        theirs = str(failure)
    ours = ids_of(model, request(prompt, arguments=arguments))
    assert (ours if isinstance(ours, list) else str(ours).removeprefix("chat template: ")) == theirs


def test_the_first_of_several_named_templates(tmp_path: Path) -> None:
    """It is taken; where the server was given a name, prompts are left to it."""
    model = make_tokenizer(tmp_path, None)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "plain", "template": "{{ messages[0].content }}"},
        {"name": "loud", "template": "{{ messages[0].content | upper }}"},
    ]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    one = request(messages(("user", "hello")))
    assert Encoder("messages", model, TokenBudget(None)).prompt_text(one) == "hello"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'].codecs.open('/etc/hostname').read() }}",
        "{% set x = messages.append(1) %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    """What comes with a model of unknown origin computes a text, and reaches no Python, file or command."""
    found = ids_of(make_tokenizer(tmp_path, template), request(messages(("user", "x"))))
    assert isinstance(found, RowRefusedError)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model")
