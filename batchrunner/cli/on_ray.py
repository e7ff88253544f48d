"""The command that does a job on a Ray cluster."""

from typing import Annotated

import typer

from batchrunner.cli.options import (
    FreshOption,
    JobArgument,
    JsonOption,
    LimitOption,
    NoPythonOption,
    QuietOption,
    RetryFailedOption,
    SetOption,
    VerboseOption,
    with_limit,
)
from batchrunner.cli.running import telling_report
from batchrunner.core.console import show, tell
from batchrunner.core.errors import JobError


def ray(
    job: JobArgument,
    workers: Annotated[
        int,
        typer.Option(metavar="N", help="Workers, each with an engine; one without room waits for it."),
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The cluster's head node; RAY_ADDRESS or the cluster on this machine unless given. "
            "`local` starts one of this machine alone.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(metavar="N", help="Cores that Ray keeps for a worker.")] = 1,
    overrides: SetOption = None,
    limit: LimitOption = None,
    fresh: FreshOption = False,
    retry_failed: RetryFailedOption = False,
    no_python: NoPythonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run or resume a job on a Ray cluster.

    Workers share the rows, and one that dies is replaced.
    The nodes share input and output, by a file system or an object store.

    Example: batchrun ray jobs/summarize.yaml --workers 8 --address 10.0.0.1:6379
    """
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet, details=verbose or as_json)
    try:
        from batchrunner.ray.whole_job import run_on_ray  # noqa: PLC0415 - Ray may be missing
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise JobError("Ray is not installed", hint="pip install 'batchrunner[ray]'") from None
    with telling_report(quiet=quiet or as_json):
        done = run_on_ray(
            job, with_limit(overrides, limit), workers=workers, address=address, cpus=cpus,
            fresh=fresh, retry_failed=retry_failed, no_python=no_python, quiet=quiet, as_json=as_json,
        )  # fmt: skip
    if as_json:
        show(done.as_dict())
    elif not quiet or done.exit_code:
        tell("\n".join(done.lines()))
    if not as_json and not quiet:
        show([done.results])
    raise typer.Exit(done.exit_code)
