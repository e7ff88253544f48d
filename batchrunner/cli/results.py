"""Commands that read runs: status, merge, report, advise."""

from typing import Annotated

import typer

from batchrunner.cli.options import JsonOption, RunArgument
from batchrunner.core.console import show, tell


def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the state of a run: rows, failures, load, time left.

    The run may be at work in another process, or on another machine that shares its path.

    Example: batchrun status out/summarize
    """
    from batchrunner.runner.status import status as status_of  # noqa: PLC0415
    from batchrunner.runner.status import status_lines  # noqa: PLC0415

    state = status_of(run)
    show(state.as_dict() if as_json else status_lines(state))


def merge(
    run: RunArgument,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The file to write instead, such as answers.csv."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's results in input order: RUN/merged, or one file.

    RUN/merged is a dataset of Parquet files. FILE is CSV, JSON Lines, Parquet or Arrow, by its ending, also
    compressed. The exit code is 1 while rows are missing.

    Example: batchrun merge out/summarize answers.csv
    """
    from batchrunner.report.merged import merge_run  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr()
    merged = merge_run(run, file, force=force)
    if not as_json:
        tell(*merged.lines())
    show(merged.as_dict() if as_json else [merged.path])
    raise typer.Exit(merged.exit_code)


def report(
    run: RunArgument,
    in_browser: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the page of a run: RUN/report.html.

    The run may be over, at work or killed.

    Example: batchrun report out/summarize --open
    """
    from batchrunner.output.run_dir import look_at_run  # noqa: PLC0415
    from batchrunner.report.html.page import write_page  # noqa: PLC0415

    run_dir = look_at_run(run)
    page = str(write_page(run_dir))
    place = f"{run_dir.store.uri}/{run_dir.report_html.name}" if run_dir.store.uri else page
    show({"page": place} if as_json else [place])
    if in_browser:
        typer.launch(page)


def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOGFILE|URL|RUN",
            help="A log of SGLang, the address of a server, or a run's path.",
        ),
    ],
    span: Annotated[float, typer.Option(metavar="SECONDS", help="How long to watch a server.")] = 20.0,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU, such as H100, where nothing tells."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which SGLang flag to change, from a log, a server or a run.

    Example: batchrun advise out/summarize
    """
    from batchrunner.runner.advise import advise as judge  # noqa: PLC0415

    found = judge(source, span_s=span, card=card)
    show(found.as_dict() if as_json else found.lines())
