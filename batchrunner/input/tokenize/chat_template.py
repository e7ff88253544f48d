"""Reads the tokenizer files of a model, and renders its chat template like SGLang 0.5.23, in a sandbox.

A template is code of whoever published the model. The sandbox lets this code produce text and nothing else.
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
"""Keys of `chat_template_kwargs` that do not reach the template, because they are arguments of transformers'
apply_chat_template or of SGLang's chat endpoint."""


_BEGINNING = 64
"""Number of characters at the beginning of a text that suffice to find its first token."""
_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """A compiled chat template, which renders messages as the text of a prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; raises CannotTokenizeError.

        `special_tokens` maps `bos_token`, `eos_token` and so on to their texts.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as failure:
            raise CannotTokenizeError(f"the chat template cannot be compiled: {failure}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text up to the assistant's answer; raises RowRefusedError if that fails."""
        values = {**self._special_tokens, **(arguments or {})}
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **values
            )
        except Exception as failure:  # noqa: BLE001 - a template may use any operator
            reason = str(failure) or type(failure).__name__
            raise RowRefusedError(f"chat template: {' '.join(reason.split())}") from None

    def refuse_failing(self, body: Mapping[str, Any]) -> None:
        """Raise RowRefusedError for the body of a chat that the template fails to render in SGLang.

        A chat passes without a test if its prompt depends on more than this template and the body. If the
        template fails with tools in OpenAI's form, it is rendered again with their functions alone, as in
        SGLang.
        """
        arguments = dict(body.get("chat_template_kwargs") or {})
        arguments.pop("spaces_between_special_tokens", None)
        if body.get("reasoning_effort") is not None:
            arguments.setdefault("reasoning_effort", body["reasoning_effort"])
        messages, tools = _messages_shown(body), _tools_shown(body)
        if messages is None or not RESERVED_ARGUMENTS.isdisjoint(arguments):
            return
        try:
            self.render(messages, arguments, tools)
        except RowRefusedError:
            if tools is None:
                raise
            self.render(messages, arguments, [tool["function"] for tool in tools])


def _messages_shown(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of a chat as SGLang passes them to a template; None for contents in parts."""
    messages: list[dict[str, Any]] = []
    for message in body["messages"]:
        fields = {name: value for name, value in message.items() if value is not None}
        if not isinstance(fields.setdefault("content", ""), str):
            return None
        if "tool_calls" in fields:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in fields["tool_calls"]]
        messages.append(fields)
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        if not body.get("continue_final_message"):
            messages.append({"role": "user", "content": last["content"]})
    return messages


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _tools_shown(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a chat as SGLang passes them to a template."""
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        chosen_name = choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == chosen_name]
    if not tools or choice == "none":
        return None
    unset = {"description": None, "parameters": None, "strict": None}
    shown = []
    for tool in tools:
        function = {**unset, **tool["function"]}
        shown.append({"type": "function", **tool, "function": function})
    return shown


def has_chat_template(directory: Path) -> bool:
    """Tell whether a model directory has a chat template."""
    return bool(_source_in(directory))


def load_chat_template(directory: Path) -> ChatTemplate:
    """Load the chat template of a model directory, the first one if it has several.

    `chat_template.jinja` wins over `chat_template` in tokenizer_config.json. Raises CannotTokenizeError.
    """
    source = _source_in(directory)
    if not source:
        raise CannotTokenizeError(f"{directory}: no chat template")
    tokens = {**read_json(directory / "special_tokens_map.json"), **read_json(directory / _CONFIG)}
    return ChatTemplate(source, _special_tokens(tokens))


def _source_in(directory: Path) -> Any:
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = read_json(directory / _CONFIG).get("chat_template")
    return source[0]["template"] if source and isinstance(source, list) else source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a configuration, by name.

    The configuration writes them as texts or as `{"content": …}`.
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


def added_twice(tokenizer: Any, text: str) -> str | None:
    """Return the special token that a tokenizer adds before a text that already begins with this token.

    Return None if it adds no token twice.
    """
    added = tokenizer.encode("", add_special_tokens=True).ids[:1]
    begin = tokenizer.encode(text[:_BEGINNING], add_special_tokens=False).ids[:1]
    return str(tokenizer.id_to_token(added[0])) if added and added == begin else None


def load_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of tokenizer.json, which neither truncates nor pads.

    Raises CannotTokenizeError where the file is missing or broken.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - few processes need it

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
