"""The page on the command line, from the command itself."""

import inspect
from collections import Counter
from typing import Any

import typer

from batchrunner.cli import app
from docs.tools.reference.markdown import named, one_line, paragraphs

HEAD = """# Command line

`batchrun JOB.yaml` is short for `batchrun run JOB.yaml`, and `python -m batchrunner` is the same command.
`batchrun COMMAND --help` shows what this page has. See also: [exit codes](exit-codes.md).

A run prints the path of its results, `RUN/parts`, to standard output; the log goes to standard error.
With `--json`, a command prints its result ([keys](json-output.md)) or its error as JSON:

```json
{
  "error": {
    "type": "JobError", "message": "job.yaml: unknown key 'smapling'", "hint": "did you mean 'sampling'?"
  },
  "exit_code": 2
}
```

## On a terminal

A run first prints the rows to do, the limit of requests in flight and the order, each with its reason. Then
a bar shows [these figures](../troubleshooting.md#progress-line); where standard error is not a terminal, a
line does so every 5 s. While a server starts, a line every 15 s says what it does."""

SHARED = "## Options of several commands"
COMMANDS_THAT_SHARE = 2
"""Commands from which on an option stands in the table of shared ones."""


def commands() -> dict[str, Any]:
    """Return the commands by name; `batchrun` without one comes first."""
    group: Any = typer.main.get_command(app)
    return {"": group, **group.commands}


def page() -> str:
    """Return the page."""
    rows = Counter(_parameter(one) for command in commands().values() for one in command.params)
    shared = {row for row, times in rows.items() if times >= COMMANDS_THAT_SHARE}
    shared_options = named(row for row in rows if row in shared)
    texts = [_command(name, command, shared) for name, command in commands().items() if name]
    return "\n\n".join([HEAD, SHARED, shared_options, *texts])


def _command(name: str, command: Any, shared: set[tuple[str, str]]) -> str:
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    parts = [f"## batchrun {name}", paragraphs(text)]
    if example:
        parts.append(f"Example: `{one_line(example)}`")
    rows = [_parameter(parameter) for parameter in command.params]
    options = [row for row in rows if row not in shared]
    if options:
        parts.append(named(options))
    names = [row[0].split("`")[1] for row in rows if row in shared]
    if names:
        parts.append(("Also " if options else "Takes ") + ", ".join(f"`{one}`" for one in names) + ".")
    return "\n\n".join(parts)


def _parameter(parameter: Any) -> tuple[str, str]:
    """Return what names a parameter, and its help with its default."""
    shown = parameter.metavar or "TEXT"
    default = "" if parameter.required else _default(parameter.default)
    meaning = f"{parameter.help} {default}".strip()
    if parameter.param_type_name == "argument":
        return f"`{shown}`", meaning
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    must = ", required" if parameter.required else ""
    return names + must if parameter.is_flag else f"{names} `{shown}`{must}", meaning


def _default(value: object) -> str:
    if value in (None, "", []) or isinstance(value, bool):
        return ""
    return f"Default: `{value:g}`." if isinstance(value, float) else f"Default: `{value}`."
