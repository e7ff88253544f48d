"""Synthetic texts that follow a JSON Schema or a regular expression, and synthetic tool calls."""

import contextlib
import functools
import math
import re
import string
from collections.abc import Callable, Sequence
from random import Random
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any
from zlib import crc32

import orjson

from batchrunner.core.types import Request
from batchrunner.job.arrow_types import part_at

MOST_DEPTH = 16
"""Maximum depth of a synthetic JSON value. Without a maximum, a schema that refers to itself would have no
end."""
MOST_TURNS_WITH_CALLS = 2
"""Maximum number of turns with tool calls after a message of the user. Then the chat is answered in words."""
_WORD = "simulated"
_MOST_MORE = 4
"""Maximum number of repetitions beyond the minimum that a regular expression demands (3 in `a{3,}`)."""
_TRIES = 20
"""Maximum number of texts that are tried for a regular expression with anchors or lookarounds, which only a
test of the complete text can check."""
BEYOND_ASCII = 0xE4
"""Code of a letter beyond ASCII (ä), for character classes that exclude all of ASCII."""
_CHARACTERS = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation + " \n\t"
"""Characters that synthetic texts consist of, if the regular expression allows them."""


def text_by_grammar(sampling: dict[str, Any], number: int, most_characters: int) -> str | None:
    """Return a text that follows the `json_schema` or `regex` of sampling parameters; None without these.

    Equal `number`s give equal texts. A text that reaches `most_characters` may be truncated there.
    """
    if schema := sampling.get("json_schema"):
        return json_of_schema(schema, number)
    if pattern := sampling.get("regex"):
        return _matching(pattern, number, most_characters)
    return None


def json_of_schema(schema: Any, number: int) -> str:
    """Return JSON that follows a schema, which is a mapping or JSON text; equal `number`s give equal JSON."""
    root = orjson.loads(schema) if isinstance(schema, str) else schema
    return orjson.dumps(_value(root, root, number, 0)).decode()


def _value(schema: Any, root: Any, number: int, depth: int) -> Any:
    """Return a value that follows `schema`, which is a part of the schema `root`.

    A `$ref` in `schema` names another part of `root`. Return None if `depth` exceeds MOST_DEPTH.
    """
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        # A `$ref` that leads nowhere is ignored.
        with contextlib.suppress(LookupError):
            return _value(part_at(root, schema["$ref"]), root, number, depth + 1)
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return choices[number % len(choices)]
    if alternatives := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _value(alternatives[0], root, number, depth + 1)
    return _value_of_type(schema, root, number, depth + 1)


def _value_of_type(schema: dict[str, Any], root: Any, number: int, depth: int) -> Any:
    """Return a value of a schema's type; see `_value`. If a schema has several types, the first is chosen."""
    types = schema.get("type", "object" if "properties" in schema else "string")
    minimum = schema.get("minimum", 0)
    match types[0] if isinstance(types, list) else types:
        case "object":
            properties = schema.get("properties", {}).items()
            return {name: _value(value_schema, root, number, depth) for name, value_schema in properties}
        case "array":
            item_numbers = range(number, number + schema.get("minItems", 1))
            return [_value(schema.get("items", {}), root, item, depth) for item in item_numbers]
        case "integer" | "number":
            return min(minimum + number % 10, schema.get("maximum", math.inf))
        case "boolean":
            return number % 2 == 0
        case "string":
            pattern = schema.get("pattern")
            text = None if pattern is None else _matching(pattern, number, math.inf)
            # Without a pattern, the text is a word that is padded or truncated to the allowed length.
            return text or _WORD.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]
    return None


def _matching(pattern: str, number: int, most_characters: float) -> str | None:
    """Return a text that a regular expression fully matches.

    Return None if Python's `re` cannot parse the expression, or if no text is found in _TRIES attempts.
    """
    try:
        compiled, parsed = re.compile(pattern), _parsed(pattern)
    except (re.error, RecursionError):
        return None
    for attempt in range(_TRIES):
        writer = _RegexWriter(Random(number + attempt), most_characters)  # noqa: S311 - no secret
        text = writer.write(parsed)
        # A truncated text need not match the expression.
        is_truncated = writer.room <= 0
        if writer.is_certain or is_truncated or compiled.fullmatch(text):
            return text
    return None


@functools.lru_cache(64)
def _parsed(pattern: str) -> Sequence[tuple[Any, Any]]:
    """Parse a regular expression with Python's own parser: return a list of (kind of node, its value)."""
    return _parser.parse(pattern)  # type: ignore[no-any-return]


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdigit,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}
"""Tests of a character for digits, blanks and word characters, by their names in Python's regex parser."""


class _RegexWriter:
    """Writes a text that matches a regular expression, which Python's own parser has parsed."""

    def __init__(self, random: Random, room: float) -> None:
        """Limit the text to `room` characters."""
        self.room = room
        """Number of characters that may still be written."""
        self.is_certain = True
        """Whether the text is sure to match. If not, the complete text must be tested, which may take
        long."""
        self._random = random
        self._groups: dict[int, str] = {}
        """Texts of the groups that are written so far, by group number."""

    def write(self, nodes: Sequence[tuple[Any, Any]]) -> str:
        """Return a text that matches the nodes of a parsed regular expression, until no room is left."""
        return "".join(self._node(kind, value) for kind, value in nodes if self.room > 0)

    def _node(self, kind: Any, value: Any) -> str:
        """Return a text that matches one node of a parsed regular expression."""
        match kind:
            case kinds.MAX_REPEAT | kinds.MIN_REPEAT:
                minimum, maximum, repeated_nodes = value
                times = minimum + self._random.randint(0, min(_MOST_MORE, int(maximum) - minimum))
                return "".join(self.write(repeated_nodes) for _ in range(times) if self.room > 0)
            case kinds.BRANCH:
                return self.write(self._random.choice(value[1]))
            case kinds.SUBPATTERN:
                group_number, nodes = value[0], value[-1]
                text = self._groups[group_number] = self.write(nodes)
                return text
            case kinds.GROUPREF:
                text = self._groups.get(value, "")
            case kinds.LITERAL | kinds.NOT_LITERAL | kinds.ANY | kinds.IN:
                text = self._character(kind, value)
            case _:
                # This node is an anchor or a lookaround, which only a test of the complete text can check.
                self.is_certain = False
                return ""
        # The cases that call `write` have returned already, because `write` subtracts its own text from
        # `room`.
        self.room -= len(text)
        return text

    def _character(self, kind: Any, value: Any) -> str:
        """Return one character that matches a node, such as a character class."""
        if kind == kinds.LITERAL:
            return chr(value)
        choices = value if kind == kinds.IN else [(kind, value)]
        is_negated = choices[0][0] in {kinds.NOT_LITERAL, kinds.ANY, kinds.NEGATE}
        candidates = [character for character in _CHARACTERS if _is_in(character, choices) != is_negated]
        if candidates:
            return self._random.choice(candidates)
        if is_negated:
            # The character class excludes every character in _CHARACTERS.
            self.is_certain = False
            return chr(BEYOND_ASCII)
        # The character class has none of _CHARACTERS. Take its first character, or the first of its first
        # range.
        code = choices[0][1]
        return chr(code[0] if isinstance(code, tuple) else code)


def _is_in(character: str, choices: Sequence[tuple[Any, Any]]) -> bool:
    """Tell whether a character is in a character class; a negation of the class is ignored.

    The caller negates the result for a negated class, such as `[^a]` (NOT_LITERAL) or a dot (ANY).
    """
    for kind, value in choices:
        match kind:
            case kinds.LITERAL | kinds.NOT_LITERAL:
                is_match = ord(character) == value
            case kinds.ANY:
                # A dot counts as `[^\n]`. So the class before the negation has only the line end.
                is_match = character == "\n"
            case kinds.RANGE:
                is_match = value[0] <= ord(character) <= value[1]
            case kinds.CATEGORY:
                # `value` is a constant of Python's parser, such as CATEGORY_DIGIT or CATEGORY_NOT_DIGIT.
                _, *negation, name = str(value).split("_")
                is_match = _CATEGORIES[name](character) != bool(negation)
            case _:
                is_match = False
        if is_match:
            return True
    return False


def tool_call(request: Request, number: int) -> dict[str, Any] | None:
    """Return a call of one of a chat's tools; None for an answer in words.

    After a user's message, one or two turns have tool calls, unless `tool_choice` demands or forbids calls.
    """
    tools = request.tools
    if tools is None or not tools.tools or tools.choice == "none":
        return None
    turns = _turns_since_the_user(request.prompt)
    turns_with_calls = sum(1 for message in turns if message.get("tool_calls"))
    is_call_optional = tools.choice is None or tools.choice == "auto"
    if is_call_optional:
        # The messages up to the user's last one are the same in all later turns. So they decide how many of
        # these turns have calls.
        shared_messages = request.prompt[: len(request.prompt) - len(turns)]
        shared_hash = crc32(repr(shared_messages).encode("utf-8", "replace"))
        if turns_with_calls >= 1 + shared_hash % MOST_TURNS_WITH_CALLS:
            return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.tools}
    name = [*functions][number % len(functions)]
    if isinstance(tools.choice, dict):
        name = tools.choice["function"]["name"]
    schema = functions.get(name, {}).get("parameters") or {"type": "object"}
    arguments = json_of_schema(schema, number)
    call_id = f"call_{number:08x}{turns_with_calls:02x}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turns_since_the_user(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the messages after the user's last message; all messages if the user has sent none."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].get("role") == "user":
            return messages[end:]
    return messages
