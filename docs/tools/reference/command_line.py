"""The page on the command line, from the command itself."""

import inspect
from collections import Counter
from typing import Any

import typer

from batchrunner.cli import app
from docs.tools.reference.markdown import fenced, paragraphs, table

HEAD = """# Command line

`batchrun JOB.yaml` is short for `batchrun run JOB.yaml`, and `python -m batchrunner` is the same command.
`batchrun COMMAND --help` shows what this page has. The [exit codes](exit-codes.md) have a page of their
own. `batchrun --version` shows the version.

## Standard output

A run prints the path of its results, `RUN/parts`, and nothing else; all that a person reads while it works
goes to standard error. `--json` prints the result of a command as JSON ([keys](json-output.md)); an error
is then JSON too:

```json
{
  "error": {
    "type": "JobError", "message": "job.yaml: unknown key 'smapling'", "hint": "did you mean 'sampling'?"
  },
  "exit_code": 2
}
```

An error that nobody foresaw is one line and exit code 1. The line names a file in the directory for
temporary files that has the traceback: report the error with that file.

## On a terminal

A run begins with the rows to do, the requests in flight and the order, each with its reason. Then comes a
bar and, as far as the terminal is wide, rows, time left, failed rows and the engine: running and waiting
requests with the range in which the queue is kept, used share of the KV pool, share of prompt tokens from
the prefix cache. Where standard error is no terminal, there is such a line every 5 s. While a server starts,
a line every 15 s says what it does: `the engine is still starting, 30 s: loading the weights, 3 of 4`."""

COLUMNS = ["argument or option", "default", "meaning"]

SHARED = """## Options of several commands

The commands below name those that they take; the table says what they do."""
COMMANDS_THAT_SHARE = 3
"""Commands from which on an option stands in the table of shared ones."""


def commands() -> dict[str, Any]:
    """Return the commands by name; `batchrun` without one comes first."""
    group: Any = typer.main.get_command(app)
    return {"": group, **group.commands}


def page() -> str:
    """Return the page."""
    rows = Counter(tuple(_parameter(one)) for command in commands().values() for one in command.params)
    shared = {row for row, times in rows.items() if times >= COMMANDS_THAT_SHARE}
    known = table(COLUMNS, [list(row) for row in rows if row in shared])
    texts = [_command(name, command, shared) for name, command in commands().items() if name]
    return "\n\n".join([HEAD, SHARED, known, *texts])


def _command(name: str, command: Any, shared: set[tuple[str, ...]]) -> str:
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    parts = [f"## batchrun {name}", paragraphs(text)]
    if example:
        parts += [f"<!-- not run: an example of the form -->\n{fenced(example, 'sh')}"]
    rows = [_parameter(parameter) for parameter in command.params]
    own = [row for row in rows if tuple(row) not in shared]
    if own:
        parts.append(table(COLUMNS, own))
    names = [row[0].split("`")[1] for row in rows if tuple(row) in shared]
    if names:
        parts.append(("Also " if own else "Takes ") + ", ".join(f"`{one}`" for one in names) + ".")
    return "\n\n".join(parts)


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
