"""Reads the tokenizer files of a model, and renders its chat template like SGLang 0.5.23, in a sandbox.

A template is code that comes with a model, from anyone: the sandbox lets it make a text and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.core.errors import CannotTokenizeError, RowRefusedError
from batchrunner.core.files import read_json

RESERVED_ARGUMENTS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "messages", "spaces_between_special_tokens"}
)
"""Keys of `chat_template_kwargs` that do not reach the template: arguments of transformers'
apply_chat_template and of SGLang's chat endpoint."""


class ChatTemplate:
    """A compiled chat template, which turns messages into the text of the prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; raises CannotTokenizeError.

        `special_tokens` maps `bos_token`, `eos_token` and so on to their texts.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as failure:
            raise CannotTokenizeError(f"the chat template cannot be compiled: {failure}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None) -> str:
        """Return the prompt's text up to the assistant's answer; raises RowRefusedError where that fails."""
        values = {**self._special_tokens, **(arguments or {})}
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **values
            )
        except Exception as failure:  # noqa: BLE001 - a template runs through any operator
            said = str(failure) or type(failure).__name__
            raise RowRefusedError(f"chat template: {' '.join(said.split())}") from None


def load_chat_template(directory: Path) -> ChatTemplate:
    """Load the chat template of a model directory, of several the first.

    `chat_template.jinja` wins over `chat_template` in tokenizer_config.json. Raises CannotTokenizeError.
    """
    config = read_json(directory / "tokenizer_config.json")
    source: Any
    try:
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = config.get("chat_template")
    if source and isinstance(source, list):
        source = source[0]["template"]
    if not source:
        raise CannotTokenizeError(f"{directory}: no chat template")
    tokens = {**read_json(directory / "special_tokens_map.json"), **config}
    return ChatTemplate(source, _special_tokens(tokens))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a configuration, by name.

    It gives them as texts or as `{"content": …}`.
    """
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training and prints its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content as a scope of its own: variables set in it are unknown outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment like `_compile_jinja_template` in transformers' chat_template_utils."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as they
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **named)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of tokenizer.json, which neither truncates nor pads.

    Raises CannotTokenizeError where the file is missing or broken.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where it is asked for

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CannotTokenizeError(f"{directory}: no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001 - the library raises Exception itself
        raise CannotTokenizeError(f"{path}: {failure}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
