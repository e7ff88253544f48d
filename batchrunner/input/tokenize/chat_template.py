"""Reads a model's tokenizer files, and renders its chat template in a sandbox, like SGLang 0.5.23.

A chat template is code by the publisher of the model. In the sandbox, it can only produce text.
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
"""Keys of `chat_template_kwargs` that do not reach the template.

They are arguments of transformers' `apply_chat_template` or of SGLang's chat endpoint.
"""


_BEGINNING = 64
"""Number of characters at the start of a text that suffice to find its first token."""
_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """Compiled chat template of a model, which renders messages as the text of a prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; raise CannotTokenizeError if this fails.

        `special_tokens` has the texts of special tokens by name, such as `bos_token`.
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
        """Return the text of the prompt up to the assistant's answer; raise RowRefusedError on failure.

        `arguments` are the job's `chat_template_kwargs`.
        """
        values = {**self._special_tokens, **(arguments or {})}
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **values
            )
        except Exception as failure:  # noqa: BLE001 - a template may use any operator
            reason = str(failure) or type(failure).__name__
            raise RowRefusedError(f"chat template: {' '.join(reason.split())}") from None

    def refuse_failing(self, body: Mapping[str, Any]) -> None:
        """Raise RowRefusedError if SGLang would fail to render the template for the body of a chat.

        If the prompt depends on more than this template and the body, no test is made.
        """
        arguments = dict(body.get("chat_template_kwargs") or {})
        # SGLang does not pass this argument to the template.
        arguments.pop("spaces_between_special_tokens", None)
        if body.get("reasoning_effort") is not None:
            arguments.setdefault("reasoning_effort", body["reasoning_effort"])
        messages, tools = _messages_for_template(body), _tools_for_template(body)
        if messages is None or not RESERVED_ARGUMENTS.isdisjoint(arguments):
            return
        try:
            self.render(messages, arguments, tools)
        except RowRefusedError:
            if tools is None:
                raise
            # Like SGLang, try the plain functions too, because some templates expect tools in this form.
            self.render(messages, arguments, [tool["function"] for tool in tools])


def _messages_for_template(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a chat's messages as SGLang passes them to a template; None if a message has content parts."""
    messages: list[dict[str, Any]] = []
    for message in body["messages"]:
        fields = {name: value for name, value in message.items() if value is not None}
        if not isinstance(fields.setdefault("content", ""), str):
            return None
        if "tool_calls" in fields:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in fields["tool_calls"]]
        messages.append(fields)
    # SGLang turns an assistant message at the end into a user message, or leaves it out to continue it.
    if messages[-1]["role"] == "assistant":
        assistant_message = messages.pop()
        if not body.get("continue_final_message"):
            messages.append({"role": "user", "content": assistant_message["content"]})
    return messages


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object instead of JSON text."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _tools_for_template(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return a chat's tools as SGLang passes them to a template; None if there are none."""
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        chosen_name = choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == chosen_name]
    if not tools or choice == "none":
        return None
    # SGLang fills in unset fields, so a template sees them as well.
    defaults = {"description": None, "parameters": None, "strict": None}
    tools_with_defaults = []
    for tool in tools:
        function = {**defaults, **tool["function"]}
        tools_with_defaults.append({"type": "function", **tool, "function": function})
    return tools_with_defaults


def has_chat_template(directory: Path) -> bool:
    """Tell whether a model directory has a chat template."""
    return bool(_source_in(directory))


def load_chat_template(directory: Path) -> ChatTemplate:
    """Load the chat template of a model directory; raise CannotTokenizeError if there is no usable one.

    The file `chat_template.jinja` takes precedence over `chat_template` in tokenizer_config.json. Of several
    templates, the first one is used.
    """
    source = _source_in(directory)
    if not source:
        raise CannotTokenizeError(f"{directory}: the directory has no chat template")
    tokens = {**read_json(directory / "special_tokens_map.json"), **read_json(directory / _CONFIG)}
    return ChatTemplate(source, _special_tokens(tokens))


def _source_in(directory: Path) -> Any:
    """Return the source of the chat template in a model directory; None or "" if there is none."""
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = read_json(directory / _CONFIG).get("chat_template")
    # A list has several named templates. The first one is the default.
    return source[0]["template"] if source and isinstance(source, list) else source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a tokenizer's configuration, by name such as `bos_token`.

    The configuration has each as a text or as `{"content": …}`.
    """
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


class _Generation(Extension):
    """Jinja2 extension for the tag `{% generation %}`, which marks text for training.

    The tag prints its content unchanged.
    """

    tags = {"generation"}  # noqa: RUF012 - as in jinja2's own extensions

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the tag's content as a scope of its own: its variables are not visible outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the same Jinja environment as `_compile_jinja_template` of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    # As in transformers, the time is local.
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)  # noqa: DTZ005
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **named)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def added_twice(tokenizer: Any, text: str) -> str | None:
    """Return the special token that a tokenizer would add a second time at the start of a text.

    Returns None if the text does not already begin with the token that the tokenizer adds.
    """
    # For an empty text, the tokens are only those that the tokenizer adds.
    added_ids = tokenizer.encode("", add_special_tokens=True).ids[:1]
    first_ids = tokenizer.encode(text[:_BEGINNING], add_special_tokens=False).ids[:1]
    return str(tokenizer.id_to_token(added_ids[0])) if added_ids and added_ids == first_ids else None


def load_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a model directory, without truncation and padding.

    Raises CannotTokenizeError if tokenizer.json is missing or broken.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - few processes need it

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CannotTokenizeError(f"{directory}: the directory has no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as failure:  # noqa: BLE001 - the library raises plain Exception
        raise CannotTokenizeError(f"{path}: {failure}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
