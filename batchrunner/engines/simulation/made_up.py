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
"""Maximum depth of a synthetic JSON value. It is needed because a schema may refer to itself."""
MOST_TURNS_WITH_CALLS = 2
"""Maximum number of turns with tool calls after a user's message; the next turn is an answer."""
_WORD = "simulated"
_MOST_MORE = 4
"""Maximum number of repetitions in addition to the minimum that an expression demands."""
_TRIES = 20
"""Maximum number of texts that are tried for an expression with anchors or lookarounds, which can only be
checked on a complete text."""
BEYOND_ASCII = 0xE4
_CHARACTERS = string.ascii_lowercase + string.digits + string.ascii_uppercase + string.punctuation + " \n\t"


def text_by_grammar(sampling: dict[str, Any], number: int, most_characters: int) -> str | None:
    """Return a text that follows the `json_schema` or `regex` of sampling parameters; None without these.

    Equal `number`s give equal texts. A text longer than `most_characters` may end there.
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
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        with contextlib.suppress(LookupError):
            return _value(part_at(root, schema["$ref"]), root, number, depth + 1)
    if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
        return choices[number % len(choices)]
    if parts := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _value(parts[0], root, number, depth + 1)
    return _of_type(schema, root, number, depth + 1)


def _of_type(schema: dict[str, Any], root: Any, number: int, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    least = schema.get("minimum", 0)
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            parts = schema.get("properties", {}).items()
            return {name: _value(part, root, number, depth) for name, part in parts}
        case "array":
            items = range(number, number + schema.get("minItems", 1))
            return [_value(schema.get("items", {}), root, item, depth) for item in items]
        case "integer" | "number":
            return min(least + number % 10, schema.get("maximum", math.inf))
        case "boolean":
            return number % 2 == 0
        case "string":
            pattern = schema.get("pattern")
            text = None if pattern is None else _matching(pattern, number, math.inf)
            return text or _WORD.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]
    return None


def _matching(pattern: str, number: int, most_characters: float) -> str | None:
    """Return a text that an expression fully matches; None if Python's `re` cannot parse the expression."""
    try:
        compiled, parsed = re.compile(pattern), _parsed(pattern)
    except (re.error, RecursionError):
        return None
    for attempt in range(_TRIES):
        writer = _RegexWriter(Random(number + attempt), most_characters)  # noqa: S311 - no secret
        text = writer.write(parsed)
        if writer.is_certain or writer.room <= 0 or compiled.fullmatch(text):
            return text
    return None


@functools.lru_cache(64)
def _parsed(pattern: str) -> Sequence[tuple[Any, Any]]:
    return _parser.parse(pattern)  # type: ignore[no-any-return]


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdigit,
    "SPACE": str.isspace,
    "WORD": lambda character: character.isalnum() or character == "_",
}


class _RegexWriter:
    """Writes a text for an expression that Python's own parser has parsed."""

    def __init__(self, random: Random, room: float) -> None:
        """Limit the text to `room` characters."""
        self.room = room
        """Number of characters that may still follow."""
        self.is_certain = True
        """Whether the text is known to match. If so, the match need not be tested, which may take long."""
        self._random = random
        self._groups: dict[int, str] = {}

    def write(self, parts: Sequence[tuple[Any, Any]]) -> str:
        """Return a text that matches the parsed parts of a regular expression."""
        return "".join(self._part(kind, value) for kind, value in parts if self.room > 0)

    def _part(self, kind: Any, value: Any) -> str:
        match kind:
            case kinds.MAX_REPEAT | kinds.MIN_REPEAT:
                least, most, repeated = value
                times = least + self._random.randint(0, min(_MOST_MORE, int(most) - least))
                return "".join(self.write(repeated) for _ in range(times) if self.room > 0)
            case kinds.BRANCH:
                return self.write(self._random.choice(value[1]))
            case kinds.SUBPATTERN:
                text = self._groups[value[0]] = self.write(value[-1])
                return text
            case kinds.GROUPREF:
                text = self._groups.get(value, "")
            case kinds.LITERAL | kinds.NOT_LITERAL | kinds.ANY | kinds.IN:
                text = self._character(kind, value)
            case _:  # an anchor or a lookaround
                self.is_certain = False
                return ""
        self.room -= len(text)
        return text

    def _character(self, kind: Any, value: Any) -> str:
        if kind == kinds.LITERAL:
            return chr(value)
        choices = value if kind == kinds.IN else [(kind, value)]
        is_negated = choices[0][0] in {kinds.NOT_LITERAL, kinds.ANY, kinds.NEGATE}
        candidates = [character for character in _CHARACTERS if _is_in(character, choices) != is_negated]
        if candidates:
            return self._random.choice(candidates)
        code = choices[0][1]  # of a character beyond ASCII, or a range of them
        if is_negated:
            self.is_certain, code = False, BEYOND_ASCII
        return chr(code[0] if isinstance(code, tuple) else code)


def _is_in(character: str, choices: Sequence[tuple[Any, Any]]) -> bool:
    """Tell whether a character class contains a character, as if the class were not negated."""
    for kind, value in choices:
        match kind:
            case kinds.LITERAL | kinds.NOT_LITERAL:
                is_one = ord(character) == value
            case kinds.ANY:
                is_one = character == "\n"
            case kinds.RANGE:
                is_one = value[0] <= ord(character) <= value[1]
            case kinds.CATEGORY:
                _, *negation, name = str(value).split("_")
                is_one = _CATEGORIES[name](character) != bool(negation)
            case _:
                is_one = False
        if is_one:
            return True
    return False


def tool_call(request: Request, number: int) -> dict[str, Any] | None:
    """Return a call of one of a chat's tools; None for an answer in words.

    One or two turns after a user's message have calls, unless the request demands or forbids calls.
    """
    tools = request.tools
    if tools is None or not tools.tools or tools.choice == "none":
        return None
    is_free = tools.choice in {None, "auto"} if not isinstance(tools.choice, dict) else False
    turns = _turns_since_the_user(request.prompt)
    prefix = request.prompt[: len(request.prompt) - len(turns)]
    calls = sum(1 for message in turns if message.get("tool_calls"))
    turns_with_calls = 1 + crc32(repr(prefix).encode("utf-8", "replace")) % MOST_TURNS_WITH_CALLS
    if is_free and calls >= turns_with_calls:
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.tools}
    name = [*functions][number % len(functions)]
    if isinstance(tools.choice, dict):
        name = tools.choice["function"]["name"]
    schema = functions.get(name, {}).get("parameters") or {"type": "object"}
    arguments = json_of_schema(schema, number)
    call_id = f"call_{number:08x}{calls:02x}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _turns_since_the_user(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the messages after the user's last one."""
    for at in range(len(messages), 0, -1):
        if messages[at - 1].get("role") == "user":
            return messages[at:]
    return messages
