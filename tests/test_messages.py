"""docs/troubleshooting.md has every message of the package, as the code writes it, and no others.

On the page a message is a line of its own that ends with `<br>`; `…` stands for what differs each time.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import batchrunner
from batchrunner.core import errors
from tests.support.syntax import parsed

PACKAGE = Path(batchrunner.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type)
    and issubclass(value, (errors.BatchrunError, errors.RequestError, errors.WrongValueError))
}
SHOWN_BY = {"info", "warning", "error", "drain", "failure_message"}
"""Methods whose first argument a user reads: of a log, of a run's control, of a launched program."""
ON_THE_PAGE = re.compile(r"^[- ] (`+) ?(.+?) ?\1<br>$", re.MULTILINE)


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the package's files."""
    return {
        path.relative_to(PACKAGE.parent): parsed(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "cpu_shim" not in path.parts
    }


def forms(text: ast.expr) -> list[str]:
    """Return the forms of a text, with `…` for each value in it; none where it is made elsewhere."""
    match text:
        case ast.Constant(value=str(words)):
            return [re.sub(r"%(\.\d)?[srdfg]", "…", words)]
        case ast.JoinedStr(values=parts):
            return ["".join(forms(part)[0] if isinstance(part, ast.Constant) else "…" for part in parts)]
        case ast.IfExp(body=one, orelse=other):
            return forms(one) + forms(other)
    return []


def forms_of(call: ast.Call) -> list[str]:
    """Return the forms of a message, with the hint that is printed behind it."""
    given = {option.arg: option.value for option in call.keywords}
    said = forms(call.args[0])
    if "hint" not in given:
        return said
    mark = given.get("mark", ast.Constant(":"))
    assert isinstance(mark, ast.Constant)
    made = isinstance(given["hint"], (ast.Name, ast.Call))
    hints = ["…"] if made else forms(given["hint"])
    return [
        form if hint != "…" and hint in form else f"{form}{mark.value!s} {hint}"
        for form in said
        for hint in hints
    ]


def is_shown(call: ast.Call, path: Path) -> bool:
    """Tell whether a call's first argument is a message: an error's, or a line of the log."""
    match call.func:
        case ast.Name(id=name):
            return name in ERRORS or (name == "ValueError" and "job" in path.parts)
        case ast.Attribute(attr=name):
            return name in SHOWN_BY
    return False


def messages() -> Iterator[tuple[str, str]]:
    """Yield each message and its place, unless it has less than two words of its own."""
    for path, tree in trees().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and call.args and is_shown(call, path):
                for form in forms_of(call):
                    if len(re.findall(r"[A-Za-z]{2,}", form)) > 1:
                        yield form, f"{path}:{call.lineno}"


def on_the_page() -> list[str]:
    """Return the messages that the page has."""
    return [form.replace("\\|", "|") for _, form in ON_THE_PAGE.findall(PAGE.read_text(encoding="utf-8"))]


def line_of(form: str) -> str:
    """Return the line that the page has for a message."""
    return f"- `` {form} ``<br>" if "`" in form else f"- `{form}`<br>"


def test_every_message_is_on_the_page() -> None:
    """Who searches the page for the words of a message finds it."""
    known = set(on_the_page())
    missing = [f"{where}: explain below: {line_of(form)}" for form, where in messages() if form not in known]
    assert not missing, "\n".join([f"docs/{PAGE.name} lacks these lines, without the places:", *missing])


def test_the_page_has_no_message_that_is_gone() -> None:
    """Each piece of a message on the page is in the package's code."""
    texts = [
        form
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        for form in forms(node)
    ]
    known = "\n".join([*texts, *(form for form, _ in messages())])
    gone = [form for form in on_the_page() if not all(piece in known for piece in form.split("…"))]
    assert not gone, "\n".join(["no code writes these: take them off the page:", *gone])


def test_the_page_has_each_message_once() -> None:
    """A message is explained in one place."""
    found = on_the_page()
    assert sorted(set(found)) == sorted(found)
