"""The page on the command line, from the command itself."""

import inspect
from typing import Any

import typer

from batchrunner.cli import app
from docs.tools.reference.markdown import fenced, paragraphs, table

HEAD = """# Command line

`batchrun JOB.yaml` is short for `batchrun run JOB.yaml`, and `python -m batchrunner` is the same command.
`batchrun COMMAND --help` shows what this page has. The [exit codes](exit-codes.md) have a page of their
own, and so does what [`--json`](json-output.md) prints."""


def commands() -> dict[str, Any]:
    """Return the commands by name; `batchrun` without one comes first."""
    group: Any = typer.main.get_command(app)
    return {"": group, **group.commands}


def page() -> str:
    """Return the page."""
    return "\n\n".join([HEAD, *(_command(name, command) for name, command in commands().items())])


def _command(name: str, command: Any) -> str:
    full = f"batchrun {name}".strip()
    context = command.context_class(command, info_name=full)
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    usage = " ".join([full, *command.collect_usage_pieces(context)])
    parts = [f"## {full}", paragraphs(text), fenced(usage, "text")]
    if example and name:
        parts += ["Example:", f"<!-- not run: an example of the form -->\n{fenced(example, 'sh')}"]
    rows = [_parameter(parameter) for parameter in command.params]
    return "\n\n".join([*parts, table(["argument or option", "default", "meaning"], rows)] if rows else parts)


def _parameter(parameter: Any) -> list[str]:
    shown = parameter.metavar or "TEXT"
    default = "required" if parameter.required else _default(parameter.default)
    if parameter.param_type_name == "argument":
        return [f"`{shown}`", default, parameter.help]
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    return [names if parameter.is_flag else f"{names} `{shown}`", default, parameter.help]


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else ""
    return "" if value in (None, "", []) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
