"""Jinja2 templates and filter expressions over the columns of a row, in Jinja2's immutable sandbox.

A template may compute anything. A row only fails if its prompt would contain a null or bytes, because nobody
wants the text "None" or "b'…'" in a prompt.
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
"""Maximum length of a prompt in characters, far more than any model reads."""
LINE_SHOWN = 100
"""Maximum length in characters of a template line, or of a value, in an error message."""
ANSWER_NAMES = ("output", "parsed", "reasoning", "finish_reason")
"""Variables for the parts of an answer in `accept.expression`. They hide columns of the same names."""
FILTERS_TO_TEXT = (
    "string", "upper", "lower", "trim", "title", "capitalize", "replace", "center", "truncate", "wordwrap",
    "indent", "striptags", "escape", "e", "forceescape", "urlize", "wordcount",
)  # fmt: skip
"""Filters of jinja2 that would turn a null into the text "None", and bytes into "b'…'"."""
PRINTING = frozenset({*FILTERS_TO_TEXT, "default", "d", "safe", "tojson"})
"""Filters of jinja2 whose result contains the text of their input."""
ROW = "row"
"""Template variable for the mapping of all columns, as in `row["name"]`."""
_RESERVED = {ROW, "self", "true", "false", "none", "not", "and", "or", "in", "is", "if", "else"}
"""Words that cannot name a column in a template: keywords, and variables with another meaning."""
_METHODS = {"items", "keys", "values", "get"}
"""Methods of a mapping by which a template may read any column of `row`."""
_ABOUT_NULL = re.compile(r"\bNone(Type)?\b")
"""Matches the errors of Python and jinja2 about a null."""
_PRINTED_ALIKE = {str, int, float, bool}
"""Types of values that jinja2 prints as Python's `str` does."""
_RESULT = "batchrunner_value"
"""Variable to which a compiled expression assigns its value."""


FIELDS = "fields"
"""Template variable that holds the lines of `prompt.fields`."""
_PLAIN = (str, int, float, Decimal, date, time)
"""Types that a line of `prompt.fields` shows as Python prints them; values of other types become JSON."""


def field_line(name: str, value: Any) -> str:
    """Return a column's line `name: value` in `prompt.fields`; a list or a struct becomes JSON."""
    is_plain = isinstance(value, _PLAIN) and not isinstance(value, bool)
    text = value if is_plain else json.dumps(value, ensure_ascii=False, default=str)
    return f"{name}: {text}"


def with_fields(
    prompt_of: Callable[[dict[str, Any]], Any], columns: Sequence[str], row: dict[str, Any]
) -> Any:
    """Call `prompt_of` for a row with the additional variable FIELDS, and return the prompt.

    FIELDS has a line `name: value` for each of `columns`.
    """
    return prompt_of({**row, FIELDS: "\n".join(field_line(name, row[name]) for name in columns)})


def is_template(text: str) -> bool:
    """Tell whether the text of a job's field is a template instead of the name of a column."""
    return "{{" in text or "{%" in text


class _ColumnCode:
    """A compiled template or expression over the columns of a row.

    `columns` are the names of the columns that it reads.
    """

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
            hint = None
            # A column with a space or a dash in its name may be the cause of a syntax error.
            odd_names = [name for name in available if name in text and not name.isidentifier()]
            if odd_names:
                expression = template_of_column(odd_names[0])
                hint = f"the name of the column is not an identifier: write {expression}"
            raise JobError(f"{where}: line {line}: {problem}, in {text[:LINE_SHOWN]!r}", hint=hint) from None
        self._source, self._tree = source, tree
        unknown_names = sorted(columns.difference(available))
        if unknown_names:
            raise unknown_column(JobError, where, unknown_names[0], available, in_template=True)
        self.columns = sorted(columns)
        self.printed = sorted(columns.intersection(_printed(tree)))
        """Columns whose values are printed, directly or through a filter in PRINTING."""

    def _variables(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the variables for a row: its columns, and `row` if the code reads this mapping."""
        return {**row, ROW: row} if self._reads_row else row


class Template(_ColumnCode):
    """A Jinja2 template over the columns of a row."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile a template that may use the columns `available`.

        Raises JobError, whose text begins with `where`, for bad syntax or an unknown column.
        """
        super().__init__(_environment().parse, source, where=where, available=available)
        self._plain = _plain_format(self._tree, self.columns)
        """The `%` format of a template that only prints columns, and its columns; None for any other."""
        # `render` needs these for each row, so they are looked up only once.
        self._globals = dict(self._template.globals)
        self._new_context, self._parts = self._template.new_context, self._template.root_render_func

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row; raise RowRefusedError if the template fails on the row's values."""
        text = self._plain_text(row)
        if text is None:
            text = self._rendered(row)
        if len(text) > LONGEST_PROMPT:
            raise RowRefusedError(
                f"template: the prompt has {len(text)} characters, more than the limit of {LONGEST_PROMPT}"
            )
        return text

    def _plain_text(self, row: Mapping[str, Any]) -> str | None:
        """Return the text for a row without jinja2, which takes several times as long.

        Return None if the template does more than print columns, or if a value needs jinja2's checks.
        """
        if self._plain is None:
            return None
        text_format, names = self._plain
        values = (*map(row.get, names),)
        return text_format % values if _PRINTED_ALIKE.issuperset(map(type, values)) else None

    def _rendered(self, row: Mapping[str, Any]) -> str:
        """Return the text that jinja2 renders for a row; raise RowRefusedError if it fails."""
        try:
            # jinja2's own `render` merges the globals for each row, which takes twice as long.
            context = self._new_context({**self._globals, **self._variables(row)}, shared=True)
            return "".join(self._parts(context))
        except NotTextError as failure:
            cause = self._failing_names(row, failure.kind) or "a value"
            raise RowRefusedError(f"template: {cause} {failure.problem}") from None
        except Exception as failure:  # noqa: BLE001 - templates may apply any operator to user data
            message = _error_text(failure, self.columns, row)
            if _ABOUT_NULL.search(message):
                null_columns = self._failing_names(row, type(None))
                if null_columns:
                    message += f" (in {null_columns})"
            raise RowRefusedError(f"template: {message}") from None

    def _failing_names(self, row: Mapping[str, Any], kind: type) -> str:
        """Return the names of the columns whose values make the template fail; "" if they are not found.

        The error is about a value of type `kind`. The result names the columns with such a value that the
        failing expression reads, or the whole template if the expression is unknown. Without such a column,
        it is the text of the expression.
        """
        expression = ""
        # Render the row again with slower code, which adds the failing expression to the error as a note. The
        # note is a field such as `author.name`, or names divided by commas.
        try:
            _environment(_NamingCode).from_string(self._source).render(self._variables(row))
        except Exception as failure:  # noqa: BLE001 - templates may apply any operator to user data
            notes = getattr(failure, "__notes__", ())
            if notes:
                expression = notes[-1]
        names = expression.split(", ") if expression else self.columns
        failing_columns = [name for name in names if name in row and isinstance(row[name], kind)]
        return ", ".join(failing_columns) or expression


class Predicate(_ColumnCode):
    """A boolean expression over the columns of a row, such as `input.filter`."""

    def __init__(self, source: str, *, where: str, available: Collection[str]) -> None:
        """Compile an expression that may use the columns `available`.

        Raises JobError, whose text begins with `where`, for bad syntax or an unknown column.
        """
        super().__init__(_expression_tree, source, where=where, available=available)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Tell whether the expression is true for a row. An expression that fails on a null is false.

        Raises RowRefusedError if it fails for another reason.
        """
        try:
            context = self._template.new_context(dict(self._variables(row)))
            for _ in self._template.root_render_func(context):
                # The template is an assignment, so it yields no text.
                pass
            return bool(context.vars[_RESULT])
        except Exception as failure:  # noqa: BLE001 - expressions may apply any operator to user data
            if _ABOUT_NULL.search(str(failure)):
                return False
            raise RowRefusedError(f"filter: {_error_text(failure, self.columns, row)}") from None


class AnswerExpression:
    """A job's `accept.expression`, which checks an answer together with its row.

    `columns` are the columns that the expression reads.
    """

    def __init__(self, source: str, columns: Collection[str]) -> None:
        """Compile the expression; it may read `columns` of the row. Raises JobError if it is invalid."""
        self._source = source
        available = [*ANSWER_NAMES, *(name for name in columns if name not in ANSWER_NAMES)]
        self._predicate = Predicate(source, where="accept.expression", available=available)
        self.columns = [name for name in self._predicate.columns if name not in ANSWER_NAMES]

    def reads(self, name: str) -> bool:
        """Tell whether the expression reads `name`, one of ANSWER_NAMES."""
        return name in self._predicate.columns

    def complaint(self, values: Mapping[str, Any]) -> str | None:
        """Return a complaint about an answer that the expression rejects; None if it accepts the answer.

        `values` has the answer's ANSWER_NAMES and the row's `columns`.
        """
        try:
            is_good = self._predicate(values)
        except RowRefusedError as failure:
            # A Predicate's errors begin with "filter: ", because most are filters.
            return f"accept.expression fails: {str(failure).removeprefix('filter: ')}"
        return None if is_good else f"accept.expression is not true: {self._source}"


class NotTextError(ValueError):
    """A template would print a null or bytes."""

    def __init__(self, value: bytes | None) -> None:
        super().__init__("None is not text" if value is None else "bytes are not text")
        self.problem = "is null" if value is None else "holds bytes"
        """What is wrong, in words that follow the column's name in a message."""
        self.kind = type(value)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, in which a field of a struct hides a method of the same name, such as `items`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a struct's field named `attribute`; if there is none, the attribute as in jinja2."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def joined(self, *operands: Any) -> str:
        """Return the result of the operator `~`; compiled templates call this method."""
        return "".join([str(as_text(operand)) for operand in operands])

    def named(self, expression: str, text: Callable[[], str]) -> str:
        """Return the printed text of an expression; if this fails, note the expression in the exception."""
        try:
            return text()
        except Exception as failure:
            failure.add_note(expression)
            raise

    def unless_null(self, operand: Callable[[], Any]) -> Any:
        """Return the value of an operand; None if computing it fails on a null."""
        try:
            return operand()
        except Exception as failure:
            if _ABOUT_NULL.search(str(failure)):
                return None
            raise


class _Code(CodeGenerator):
    """Generates the code of templates: `~` refuses nulls, and the left side of `or` may fail on a null."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        """Compile `~` to a call of `environment.joined`."""
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Or(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Compile `left or right` so that `left` counts as null if it fails on a null."""
        self.write("(environment.unless_null(lambda: ")
        self.visit(node.left, frame)
        self.write(") or ")
        self.visit(node.right, frame)
        self.write(")")


class _NamingCode(_Code):
    """Generates slower code, whose errors name the expression that failed."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(f"environment.named({_shown(node)!r}, lambda: ")
        super()._output_child_pre(node, frame, finalize)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_post(node, frame, finalize)
        self.write(")")


def _plain_format(tree: nodes.Template, columns: Collection[str]) -> tuple[str, Sequence[str]] | None:
    """Return a `%` format and its columns for a template that only prints columns; None for any other."""
    pieces: list[str] = []
    names: list[str] = []
    for output in tree.body:
        for node in output.nodes if isinstance(output, nodes.Output) else [output]:
            match node:
                case nodes.TemplateData(data=text):
                    pieces.append(text.replace("%", "%%"))
                case nodes.Name(name=name) if name in columns and name not in _RESERVED:
                    pieces.append("%s")
                    names.append(name)
                case _:
                    return None
    return "".join(pieces), names


def _shown(node: nodes.Node) -> str:
    """Return the field that an expression prints, such as `author.name`; else the names in the expression."""
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
    """Return the Jinja environment. Its text filters, such as `upper`, raise an error for nulls and bytes."""
    environment = _Environment(undefined=jinja2.StrictUndefined, finalize=as_text)
    environment.code_generator_class = code
    filters = environment.filters
    for name in FILTERS_TO_TEXT:
        filters[name] = _guarded(filters[name], as_text)
    filters["join"] = _guarded(filters["join"], lambda values: [*map(as_text, values)])
    # jinja2's own `tojson` escapes < > & ' for HTML, which is wrong in prompts.
    filters["tojson"] = _tojson
    filters["fromjson"] = _guarded(_fromjson, as_text)
    return environment


def _guarded(text_filter: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that passes its input through `check` before it calls `text_filter`."""
    # jinja2 passes an argument of its own, such as the environment, before the input of some filters.
    index = 1 if hasattr(text_filter, "jinja_pass_arg") else 0

    @wraps(text_filter)
    def guarded(*args: Any, **named: Any) -> Any:
        return text_filter(*args[:index], check(args[index]), *args[index + 1 :], **named)

    return guarded


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=lambda item: str(as_text(item)))


def _fromjson(value: Any) -> Any:
    """Return the value of a JSON text; return any other value, such as a struct, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as failure:
        excerpt = value if len(value) <= LINE_SHOWN else f"{value[:LINE_SHOWN]}…"
        raise ValueError(f"fromjson: {excerpt!r} is not JSON: {failure}") from None


def as_text(value: Any) -> Any:
    """Return a value that a template may print; raise NotTextError for a null or bytes.

    Bytes in lists and mappings are refused too, but nulls in them are allowed.
    """
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
    """Return the text of an error, with a hint if a text was used like a value of another type."""
    message = f"{type(failure).__name__}: {failure}"
    text_columns = [template_of_column(name) for name in columns if isinstance(row.get(name), str)]
    if not text_columns or not isinstance(failure, TypeError) or "str" not in str(failure):
        return message
    # Python's error about a text names `str`, for example "'<' not supported between 'str' and 'int'".
    names = ", ".join(text_columns)
    return f"{message} (columns with text: {names}; compare them with text, or convert them by NAME | float)"


def _expression_tree(source: str) -> nodes.Template:
    """Return the syntax tree of a template that assigns the value of an expression to a variable.

    jinja2's `compile_expression` builds the tree in the same way.
    """
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
    """Return the names of the columns that a template reads, and whether it reads the mapping `row`."""
    free_names = _free_names(tree, available)
    if ROW not in free_names:
        return free_names, False
    # `row.items` and the like are methods of the mapping, unless a column has this name.
    fields = [_field_of_row(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem))]
    columns = {name for name in fields if name and (name in available or name not in _METHODS)}
    # A use of `row` that names no column, such as a loop over it, may read any column. There is one if `row`
    # occurs more often than expressions that read a column of it.
    row_uses = sum(name.name == ROW for name in tree.find_all(nodes.Name))
    uses_with_column = sum(name in columns for name in fields)
    if uses_with_column != row_uses:
        columns = {*available}
    return free_names - {ROW} | columns, True


def _field_of_row(node: nodes.Node) -> str | None:
    """Return the column that an expression such as `row.name` or `row["name"]` reads; else None."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="row"), attr=name):
            return name
        case nodes.Getitem(node=nodes.Name(name="row"), arg=nodes.Const(value=str(name))):
            return name
    return None


def _printed(tree: nodes.Template) -> Iterator[str | None]:
    """Yield the column that each printed expression shows; None if the expression is more than a column.

    Filters that only change how a value is printed are ignored.
    """
    for output in tree.find_all(nodes.Output):
        for node in output.nodes:
            expression: nodes.Expr = node
            while isinstance(expression, nodes.Filter) and expression.name in PRINTING and expression.node:
                expression = expression.node
            yield expression.name if isinstance(expression, nodes.Name) else _field_of_row(expression)


def _free_names(tree: nodes.Template, available: Collection[str]) -> set[str]:
    """Return the variables that a template must be given: neither it nor jinja2 defines them.

    A column hides a name of jinja2. A variable that only one branch of an `if` sets counts as defined,
    although jinja2 reports it as undeclared. Only `row` does not, because it may be the mapping of all
    columns in the other branch.
    """
    environment = _environment()
    # Without globals, jinja2 also reports variables that hide one of its own names.
    environment_without_globals = environment.overlay()
    environment_without_globals.globals = {}
    tree.set_environment(environment_without_globals)
    names = jinja2.meta.find_undeclared_variables(tree)
    tree.set_environment(environment)
    template_names = {macro.name for macro in tree.find_all(nodes.Macro)}
    template_names |= {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    not_columns = (template_names - {ROW}) | set(environment.globals)
    return names - (not_columns - set(available))


def unknown_column(
    kind: type[Error], where: str, name: str, available: Collection[str], *, in_template: bool = False
) -> Error:
    """Return an error of class `kind` for a missing column, which names the most similar column.

    `where` is the job field that names the column. With `in_template`, the similar column is shown as a
    template must write it.
    """
    similar = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    if not similar:
        # `name` may be a part of a longer name, such as `title` of "title en".
        similar = [column for column in available if name in column.split() or column.startswith(name)]
    hint = None
    if similar:
        needs_row = in_template and not similar[0].isidentifier()
        suggestion = template_of_column(similar[0]) if needs_row else repr(similar[0])
        hint = f"did you mean {suggestion}?"
    # If the only column has such a character in its name, the CSV file likely has another delimiter.
    if len(available) == 1 and (mark := re.search("[;\t|]", "".join(available))):
        hint = f"if {mark[0]!r} separates the columns of the file, set input.delimiter: {json.dumps(mark[0])}"
    names = ", ".join(column or '""' for column in available)
    message = f"{where}: unknown column {name!r}{f'; {hint}' if hint else ''} (the input has: {names})"
    return kind(message, hint=hint)


def template_of_column(name: str) -> str:
    """Return the expression by which a template reads a column: its name, or `row["NAME"]` if necessary."""
    is_variable = name.isidentifier() and name.isascii() and name.lower() not in _RESERVED
    return name if is_variable else f"{ROW}[{json.dumps(name, ensure_ascii=False)}]"
