"""The command `batchrun`, of all its commands.

The files of the commands have annotations that are no texts: typer would evaluate each of them four times,
which costs every start of the command 10 ms.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from batchrunner.cli.entry import start
from batchrunner.cli.group import HELP_OPTIONS, CommandGroup
from batchrunner.cli.jobs import check, init, schema, tune
from batchrunner.cli.on_ray import ray
from batchrunner.cli.options import EXIT_CODES
from batchrunner.cli.results import advise, merge, report, status
from batchrunner.cli.running import batch, run, slurm
from batchrunner.core.console import show, version_lines

app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Offline batch inference that keeps an SGLang engine at its highest throughput.\n\n"
    "batchrun JOB.yaml runs a job; run it again to resume. `batchrun init FILE` writes a first job.\n\n"
    "Example: batchrun jobs/summarize.yaml",
    epilog=EXIT_CODES,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        show(version_lines())
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


_COMMANDS: tuple[Callable[..., None], ...] = (
    run, batch, init, check, tune, slurm, ray, status, merge, report, advise, schema,
)  # fmt: skip
"""The commands, in the order in which `--help` lists them."""
for _each in _COMMANDS:
    app.command(epilog=EXIT_CODES if _each in {run, batch, tune, ray} else None)(_each)


def main() -> None:
    """Entry point of `batchrun`."""
    start(app)
