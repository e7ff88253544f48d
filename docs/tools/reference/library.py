"""The page on the library, from the docstrings of what `batchrunner` exports."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import batchrunner
from batchrunner.report.report import Report
from batchrunner.runner.progress import Progress
from docs.tools.reference.markdown import fenced, field_list, paragraphs

HEAD = """# Python library

Everything that `import batchrunner` exports. See also the [examples](../how-to/python.md) and the list of
[errors](exit-codes.md#errors-of-the-library)."""

ORDER = ("run", "estimate", "generate", "embed", "score", "rerank", "open_engine", "stream")
"""Functions in the order of the page."""
AWAITED = """## Awaited calls

{names} do the same in a thread, so the program's event loop continues. Cancelling such a call ends its
requests in flight and keeps the finished rows of a run. If the input is an iterator, up to a thousand more
rows are read from it first."""


WIDTH = 110
"""Characters of a line of a signature."""


def page() -> str:
    """Return the page."""
    things = {name: getattr(batchrunner, name) for name in batchrunner.__all__}
    functions_and_coroutines = [thing for thing in things.values() if inspect.isfunction(thing)]
    plain = [thing for thing in functions_and_coroutines if not inspect.iscoroutinefunction(thing)]
    awaited = ", ".join(f"`{thing.__name__}`" for thing in functions_and_coroutines if thing not in plain)
    functions = [_function(thing) for thing in sorted(plain, key=lambda thing: ORDER.index(thing.__name__))]
    functions.append(AWAITED.format(names=awaited))
    classes = [
        _class(name, thing)
        for name, thing in things.items()
        if inspect.isclass(thing) and not issubclass(thing, Exception)
    ]
    return "\n\n".join([HEAD, *functions, *classes])


def _function(function: Callable[..., Any]) -> str:
    function = inspect.unwrap(function)
    head = fenced(_signature(function), "text")
    return "\n\n".join([f"## {function.__name__}", head, _linked(paragraphs(function.__doc__))])


def _class(name: str, kind: type) -> str:
    parts = [f"## {name}", _linked(paragraphs(kind.__doc__))]
    if kind is Report:
        parts += [
            "Its fields are the keys of [report.json](json-output.md); `results` is the path of the results."
        ]
    if kind is Progress:
        parts += ["Its fields:", field_list(kind)]
    if name == "Job":
        parts += [
            "Its fields are those of a [job file](job-file.md). `Job.model_validate(mapping)` makes one."
        ]
    return "\n\n".join(parts)


def _signature(function: object) -> str:
    """Return a signature without its types, which the text below it tells."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body  # type: ignore[arg-type]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    for argument in [*definition.args.args, *definition.args.kwonlyargs, definition.args.kwarg]:
        if argument is not None:
            argument.annotation = None
    result = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    return textwrap.fill(
        f"{definition.name}({ast.unparse(definition.args)}){result}", WIDTH, subsequent_indent="    "
    )


def _linked(text: str) -> str:
    return text.replace("`prompt` part of a job", "[`prompt` part of a job](job-file.md#prompt)")
