"""The command's group of commands: a job file needs no command, and errors are lines or JSON."""

import difflib
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from batchrunner.core.console import as_object, show, tell_failure, wants_json
from batchrunner.core.errors import BatchrunError, JobError, interrupted

HELP_OPTIONS = ("-h", "--help")
_ALONE = {*HELP_OPTIONS, "--version"}
_FLAGS = {"--json", "--quiet", "-q", "--verbose", "-v"}
"""Options that may stand before the first word and take no value."""
_UsageError: Any = typer.BadParameter.__base__
"""Base class of errors in the arguments; typer has no public name for it."""


class CommandGroup(TyperGroup):
    """`batchrun JOB.yaml` is `batchrun run JOB.yaml`; a BatchrunError is one line and its exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before a job file; raises JobError for a word that looks like a misspelt command."""
        place = next((i for i, arg in enumerate(args) if arg == "-" or not arg.startswith("-")), None)
        if place is not None and args[place] not in self.commands and args[0] not in _ALONE:
            if _FLAGS.issuperset(args[:place]):
                self._refuse_misspelt(args[place])
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises BatchrunError for an interrupt that the command did not handle itself."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise interrupted() from None

    def main(self, *given: Any, **options: Any) -> Any:
        """Run the command of `args` (default: `sys.argv`) and exit with its code, or return the code.

        It is returned where `standalone_mode` is false. With `--json` among the arguments an error is also an
        object on standard output.
        """
        options = {**dict(zip(("args", "prog_name"), given, strict=False)), **options}
        args = options.pop("args", None)
        words = list(sys.argv[1:] if args is None else args)
        alone = options.get("standalone_mode", True)
        as_json = wants_json(words)
        try:
            ended = super().main(words, **{**options, "standalone_mode": False})
            code = ended if isinstance(ended, int) else 0
        except BatchrunError as error:
            code = tell_failure(error, as_json=as_json)
        except _UsageError as error:
            code = error.exit_code
            if as_json:
                show(as_object(error, error.format_message(), _help_of(error), code))
            error.show()
        except typer.Abort as ended:  # what typer makes of an EOFError, which no command foresees
            raise (ended.__cause__ or ended) from None
        if alone:
            sys.exit(code)
        return code

    def _refuse_misspelt(self, word: str) -> None:
        """Raise JobError where a word is no file and looks like the name of a command."""
        near = difflib.get_close_matches(word.lower(), self.commands, n=1)
        if near and not Path(word).suffix and not _is_there(word):
            raise JobError(
                f"{word}: no such command or job file", hint=f"did you mean {near[0]!r}?", mark=";"
            )


def _help_of(error: Any) -> str:
    """Return where the arguments of the command are described that an error of typer's is about."""
    return f"{error.ctx.command_path if error.ctx else 'batchrun'} --help describes the arguments"


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long a name, a NUL
        return False
