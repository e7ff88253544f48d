"""Arguments and options that several commands share."""

from typing import Annotated

import typer

EXIT_CODES = """exit codes: 0 done · 1 could not go on (run it again to resume) · 2 the job or its input is
wrong · 3 done, but more rows failed than tolerated · 130/138/143 interrupted (run it again to resume)"""

JobArgument = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job file; `-` is standard input.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's output path.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Set a field, such as input.limit=100; may be repeated.",
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Send the first N rows only."),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Discard the run's directory and start again.")]
JoinOption = Annotated[
    bool,
    typer.Option("--join", help="Share the rows with all other starts that say --join."),
]
BackgroundOption = Annotated[
    bool,
    typer.Option("--background", help="Let others who use the servers go first: engine.background=true."),
]
BatchEngineOption = Annotated[
    list[str],
    typer.Option(
        metavar="MODEL|URL|BASE.yaml",
        help="A model, the address of a server (may be repeated for replicas), or a job with an engine.",
    ),
]
RetryFailedOption = Annotated[bool, typer.Option("--retry-failed", help="Send failed rows again.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show notes too.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result, or the error, as JSON on standard output.")
]


def with_limit(overrides: list[str] | None, limit: int | None, *, background: bool = False) -> list[str]:
    """Return what `--set` gives, and then what `--limit` and `--background` do."""
    more = [] if limit is None else [f"input.limit={limit}"]
    return [*(overrides or []), *more, *(["engine.background=true"] if background else [])]
