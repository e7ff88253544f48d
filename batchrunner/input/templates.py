"""Jinja2 templates and filter expressions over the columns of a row, in Jinja2's immutable sandbox.

The author of a job may compute anything. Only prompts that print a null or bytes are refused: nobody wants
the text "None" or "b'…'" in a prompt.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from functools import cache, wraps
from typing import Any, TypeVar

import jinja2
import jinja2.filters
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrunner.core.errors import BatchrunError, JobError, RowRefusedError, first_line

Error = TypeVar("Error", bound=BatchrunError)

LONGEST_PROMPT = 64 << 20
"""Maximum number of characters of a prompt, far more than any model reads."""
LINE_SHOWN = 100
"""Maximum number of characters of a template's line, or of a value, in an error."""
ANSWER_NAMES = ("output", "parsed", "reasoning", "finish_reason")
"""Names by which `accept.expression` reads an answer. They hide columns of the same names."""
FILTERS_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*FILTERS_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters whose result shows their input."""
ROW = "row"
"""Name of the mapping of all columns in a template."""
_TAKEN = {ROW, "self", "true", "false", "none", "not", "and", "or", "in", "is", "if", "else"}
"""Words that cannot be the name of a column in a template, because they have another meaning there."""
_METHODS = {"items", "keys", "values", "get"}
"""Methods of a mapping by which a template may read any column."""
_ABOUT_NULL = re.compile(r"\bNone(Type)?\b")
"""Pattern of Python's and jinja2's errors about a null."""
_RESULT = "batchrunner_value"
"""Variable to which a compiled expression assigns its value."""


FIELDS = "fields"
"""Name by which templates print the lines of `prompt.fields`."""
_PLAIN = (str, int, float, Decimal, date, time)
"""Types of values that a line of `prompt.fields` shows as Python prints them; others are JSON."""


def field_line(name: str, value: Any) -> str:
    """Return the line `name: value` of a field; a null is `null`, a list or a struct is JSON."""
    is_plain = isinstance(value, _PLAIN) and not isinstance(value, bool)
    return f"{name}: {value if is_plain else json.dumps(value, ensure_ascii=False, default=str)}"


def with_fields(make: Callable[[dict[str, Any]], Any], columns: Sequence[str], row: dict[str, Any]) -> Any:
    """Return the prompt that `make` renders from a row and the lines of these columns (FIELDS)."""
    return make({**row, FIELDS: "\n".join(field_line(name, row[name]) for name in columns)})


def is_template(text: str) -> bool:
    """Tell whether a text is a template and not a column name."""
    return "{{" in text or "{%" in text


class _ColumnCode:
    """Compiled template or expression over the columns of a row; `columns` are those that it reads."""

    def __init__(
        self,
        parse: Callable[[str], nodes.Template],
        source: str,
        *,
        where: str,
        available: Collection[str],
    ) -> None:
        try:
            tree = parse(source)
            columns, self._reads_row = _columns_read(tree, available)
            self._template = _environment().from_string(tree)
        except Exception as failure:  # noqa: BLE001 - jinja2 raises errors of its own and of Python's compiler
            problem = first_line(failure).removesuffix(".")
            line = failure.lineno if isinstance(failure, jinja2.TemplateSyntaxError) else 1
            text = "".join(source.splitlines()[line - 1 : line]).strip()
            odd = [name for name in available if name in text and not name.isidentifier()]
            raise JobError(
                f"{where}: line {line}: {problem}, in {text[:LINE_SHOWN]!r}",
                hint=f"a column whose name is not an identifier is written {template_of_column(odd[0])}"
                if odd
                else None,
            ) from None
        self._source = source
        for name in sorted(columns.difference(available)):
            raise unknown_column(JobError, where, name, available, in_template=True)
        self.columns = sorted(columns)
        self.printed = sorted(columns.intersection(_printed(tree)))
        """Columns that are printed, directly or through filters of PRINTING."""

    def _variables(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of its names: the columns, and their mapping if it is read."""
        return {**row, ROW: row} if self._reads_row else row


class Template(_ColumnCode):
    """A compiled template."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        super().__init__(_environment().parse, source, where=where, available=available)
        self._globals = dict(self._template.globals)
        self._new_context, self._parts = self._template.new_context, self._template.root_render_func

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row; raises RowRefusedError if the template fails on its values."""
        try:
            # jinja2's own render merges the globals anew for each row, which takes twice as long
            context = self._new_context({**self._globals, **self._variables(row)}, shared=True)
            text = "".join(self._parts(context))
        except NotTextError as failure:
            failing = self._failing(row, failure.kind) or "a value"
            raise RowRefusedError(f"template: {failing} {failure.what}") from None
        except Exception as failure:  # noqa: BLE001 - templates may apply any operator to user data
            message = _error_text(failure, self.columns, row)
            if _ABOUT_NULL.search(message) and (failing := self._failing(row, type(None))):
                message += f" (in {failing})"
            raise RowRefusedError(f"template: {message}") from None
        if len(text) > LONGEST_PROMPT:
            raise RowRefusedError(f"template: a prompt of {len(text)} characters is too long")
        return text

    def _failing(self, row: Mapping[str, Any], kind: type) -> str:
        """Return the names of the columns on which the template fails, as far as they can be found.

        These are the columns in the failing expression, or else in the whole template, that hold a value of
        type `kind`. If there is no such column, it is the field that the expression prints.
        """
        expression = ""
        try:
            _environment(_NamingCode).from_string(self._source).render(self._variables(row))
        except Exception as failure:  # noqa: BLE001 - as in `render`
            notes = getattr(failure, "__notes__", ())
            if notes:
                expression = notes[-1]
        names = expression.split(", ") if expression else self.columns
        failing_columns = [name for name in names if name in row and isinstance(row[name], kind)]
        return ", ".join(failing_columns) or expression


class Predicate(_ColumnCode):
    """A compiled boolean expression."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile `source`; raises JobError, naming `where`, on bad syntax or an unknown column."""
        super().__init__(_expression_tree, source, where=where, available=available)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return whether the expression is true for a row; it is false if it fails on a null.

        Raises RowRefusedError if it fails for another reason.
        """
        try:
            context = self._template.new_context(dict(self._variables(row)))
            for _ in self._template.root_render_func(context):
                pass
            return bool(context.vars[_RESULT])
        except Exception as failure:  # noqa: BLE001 - expressions may apply any operator to user data
            if _ABOUT_NULL.search(str(failure)):
                return False
            raise RowRefusedError(f"filter: {_error_text(failure, self.columns, row)}") from None


class AnswerExpression:
    """The job's `accept.expression` over an answer and its row; `columns` are the columns that it reads."""

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Compile the expression for rows with these columns; raises JobError."""
        self._source = source
        available = [*ANSWER_NAMES, *(name for name in columns if name not in ANSWER_NAMES)]
        self._predicate = Predicate(source, where="accept.expression", available=available)
        self.columns = [name for name in self._predicate.columns if name not in ANSWER_NAMES]

    def reads(self, name: str) -> bool:
        """Tell whether the expression reads one of ANSWER_NAMES."""
        return name in self._predicate.columns

    def complaint(self, values: Mapping[str, Any]) -> str | None:
        """Return what is wrong with an answer, in a sentence; None if nothing is."""
        try:
            is_good = self._predicate(values)
        except RowRefusedError as failure:
            return f"accept.expression fails: {str(failure).removeprefix('filter: ')}"
        return None if is_good else f"accept.expression is not true: {self._source}"


class NotTextError(ValueError):
    """A template prints a null, or bytes."""

    def __init__(self, value: bytes | None) -> None:
        super().__init__("None is not text" if value is None else "bytes are not text")
        self.what = "is null" if value is None else "holds bytes"
        self.kind = type(value)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which a struct's field hides a method of the same name, such as `items`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the struct's field of this name; without one, the attribute as jinja2 finds it."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def joined(self, *values: Any) -> str:
        """Return the result of the operator `~` for these operands."""
        return "".join([str(as_text(value)) for value in values])

    def named(self, expression: str, text: Callable[[], str]) -> str:
        """Return a printed text; add the expression to an error as a note."""
        try:
            return text()
        except Exception as failure:
            failure.add_note(expression)
            raise

    def unless_null(self, operand: Callable[[], Any]) -> Any:
        """Return the value of an operand; None if it fails on a null."""
        try:
            return operand()
        except Exception as failure:
            if _ABOUT_NULL.search(str(failure)):
                return None
            raise


class _Code(CodeGenerator):
    """Compiles `~` so that it refuses nulls, and `or` so that its left side may fail on a null."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        """Write the call that joins the operands."""
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Or(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write `left or right`."""
        self.write("(environment.unless_null(lambda: ")
        self.visit(node.left, frame)
        self.write(") or ")
        self.visit(node.right, frame)
        self.write(")")


class _NamingCode(_Code):
    """Compiles slower templates, whose errors name the expression that failed."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(f"environment.named({_shown(node)!r}, lambda: ")
        super()._output_child_pre(node, frame, finalize)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_post(node, frame, finalize)
        self.write(")")


def _shown(node: nodes.Node) -> str:
    """Return the field that an expression prints, such as `author.name`, else the names in it."""
    match node:
        case nodes.Name(name=name):
            return str(name)
        case nodes.Getattr(node=inner, attr=name):
            return f"{_shown(inner)}.{name}"
        case nodes.Getitem(node=inner, arg=nodes.Const(value=key)):
            return f"{_shown(inner)}[{json.dumps(key, ensure_ascii=False)}]"
        case nodes.Filter(node=nodes.Node() as inner):
            return _shown(inner)
    return ", ".join(dict.fromkeys(name.name for name in node.find_all(nodes.Name)))


@cache
def _environment(code: type[CodeGenerator] = _Code) -> _Environment:
    environment = _Environment(undefined=jinja2.StrictUndefined, finalize=as_text)
    environment.code_generator_class = code
    filters = environment.filters
    for name in FILTERS_TO_TEXT:
        filters[name] = _guarded(filters[name], as_text)
    filters["join"] = _guarded(filters["join"], lambda values: [*map(as_text, values)])
    filters["tojson"] = _tojson  # jinja2's own escapes < > & ' for HTML
    filters["fromjson"] = _guarded(_fromjson, as_text)
    return environment


def _guarded(text_of: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that passes its value through `check` first."""
    first = 1 if hasattr(text_of, "jinja_pass_arg") else 0  # jinja2 may pass an argument of its own first

    @wraps(text_of)
    def guarded(*args: Any, **named: Any) -> Any:
        return text_of(*args[:first], check(args[first]), *args[first + 1 :], **named)

    return guarded


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=lambda item: str(as_text(item)))


def _fromjson(value: Any) -> Any:
    """Return the value of a JSON text; a value that is no text, such as a struct, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as failure:
        excerpt = value if len(value) <= LINE_SHOWN else f"{value[:LINE_SHOWN]}…"
        raise ValueError(f"fromjson: {excerpt!r} is not JSON: {failure}") from None


def as_text(value: Any) -> Any:
    """Return a value that can be printed; raises NotTextError for a null, bytes, and values with bytes."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bytes):
        raise NotTextError(value)
    if isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            if inner is not None:
                as_text(inner)
    return value


def _error_text(failure: Exception, columns: Sequence[str], row: Mapping[str, Any]) -> str:
    """Return an error in words, with a hint if it is about text beside a value of another type."""
    message = f"{type(failure).__name__}: {failure}"
    texts = [template_of_column(name) for name in columns if isinstance(row.get(name), str)]
    if not texts or not isinstance(failure, TypeError) or "str" not in str(failure):
        return message
    return f"{message} (text is in {', '.join(texts)}: compare it with text, or convert it by NAME | float)"


def _expression_tree(source: str) -> nodes.Template:
    """Return the syntax tree of an expression, as jinja2's `compile_expression` makes it."""
    parser = Parser(_environment(), source, state="variable")
    value = parser.parse_expression()
    if not parser.stream.eos:
        token = parser.stream.current.value
        parser.fail(f"unexpected {token!r} after the expression (write ==, and, or, not, in, is none)")
    target = nodes.Name(_RESULT, "store", lineno=1)
    tree = nodes.Template([nodes.Assign(target, value, lineno=1)], lineno=1)
    tree.set_environment(_environment())
    return tree


def _columns_read(tree: nodes.Template, available: Collection[str]) -> tuple[set[str], bool]:
    """Return the names of the columns that a template reads, and whether it reads `row`."""
    free_names = _free_names(tree, available)
    if ROW not in free_names:
        return free_names, False
    fields = [_field_of_row(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem))]
    names = {name for name in fields if name and (name in available or name not in _METHODS)}
    uses = sum(name.name == ROW for name in tree.find_all(nodes.Name))
    names_each_field = sum(name in names for name in fields) == uses
    if not names_each_field:  # a loop over `row`, for example, may read any column
        names = {*available}
    return free_names - {ROW} | names, True


def _field_of_row(node: nodes.Node) -> str | None:
    """Return the name of the column that an expression such as `row.name` or `row["name"]` reads."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="row"), attr=name):
            return name
        case nodes.Getitem(node=nodes.Name(name="row"), arg=nodes.Const(value=str(name))):
            return name
    return None


def _printed(tree: nodes.Template) -> Iterator[str | None]:
    """Yield the names of the columns that a template prints."""
    for output in tree.find_all(nodes.Output):
        for node in output.nodes:
            expression: nodes.Expr = node
            while isinstance(expression, nodes.Filter) and expression.name in PRINTING and expression.node:
                expression = expression.node
            yield expression.name if isinstance(expression, nodes.Name) else _field_of_row(expression)


def _free_names(tree: nodes.Template, available: Collection[str]) -> set[str]:
    """Return the names that neither the template nor jinja2 defines; a column hides a name of jinja2.

    jinja2 reports a variable as undeclared if only one branch of an `if` sets it. It counts as defined here,
    except for `row`, which may mean the mapping of all columns in the other branch.
    """
    environment = _environment()
    bare = environment.overlay()
    bare.globals = {}
    tree.set_environment(bare)
    names = jinja2.meta.find_undeclared_variables(tree)
    tree.set_environment(environment)
    template_names = {macro.name for macro in tree.find_all(nodes.Macro)}
    template_names |= {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    not_columns = (template_names - {ROW}) | set(environment.globals)
    return names - (not_columns - set(available))


def unknown_column(
    kind: type[Error], where: str, name: str, available: Collection[str], *, in_template: bool = False
) -> Error:
    """Return an error for a missing column; its hint names the most similar column."""
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    near = near or [column for column in available if name in column.split() or column.startswith(name)][:1]
    hint = None
    if near:
        is_odd = in_template and not near[0].isidentifier()  # it can only be read through `row`
        hint = f"did you mean {template_of_column(near[0]) if is_odd else repr(near[0])}?"
    if len(available) == 1 and (mark := re.search("[;\t|]", "".join(available))):
        hint = f"if {mark[0]!r} separates the columns of the file, set input.delimiter: {json.dumps(mark[0])}"
    names = ", ".join(column or '""' for column in available)
    message = f"{where}: unknown column {name!r}{f'; {hint}' if hint else ''} (the input has: {names})"
    return kind(message, hint=hint)


def template_of_column(name: str) -> str:
    """Return the expression by which a template reads a column, whatever its name."""
    plain = name.isidentifier() and name.isascii() and name.lower() not in _TAKEN
    return name if plain else f"{ROW}[{json.dumps(name, ensure_ascii=False)}]"
