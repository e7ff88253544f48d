"""Commands that make, look at and improve a job: init, check, estimate, tune, schema."""

import logging
from typing import Annotated, Literal

import typer

from batchrunner.cli.options import (
    JobArgument,
    JsonOption,
    LimitOption,
    QuietOption,
    SetOption,
    with_limit,
)
from batchrunner.core.console import show


def init(
    data: Annotated[str, typer.Argument(metavar="FILE", help="The data: a file, a directory or a glob.")],
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="Engine of the job: server or simulated.")
    ] = "server",
) -> None:
    """Print a commented job for a data file, with its columns.

    Example: batchrun init docs.parquet > job.yaml
    """
    from batchrunner.input.new_job import new_job  # noqa: PLC0415
    from batchrunner.job.fields import user_path  # noqa: PLC0415
    from batchrunner.runner.earlier_results import with_merged_results  # noqa: PLC0415

    (files,) = with_merged_results(user_path(data))
    show(new_job(data, engine, files).rstrip("\n").split("\n"))


def check(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|REQUESTS.jsonl", help="The job file, `-` for standard input, or a batch file."
        ),
    ],
    overrides: SetOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate a job or a batch file, show three prompts, send nothing.

    The first 1,000 rows, or all requests of a batch file, are looked at, to count those that cannot be sent.
    If none can, the exit code is 3.

    Example: batchrun check jobs/summarize.yaml
    """
    from batchrunner.runner.check import check as check_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr()  # what the job's Python functions print
    found = check_job(job, with_limit(overrides, limit))
    show(found.as_dict() if as_json else found.lines())
    raise typer.Exit(found.exit_code)


def estimate(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Most rows of the sample.")] = 500,
    price: Annotated[
        float | None, typer.Option(metavar="P", help="Price of a GPU-hour, for the cost.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(metavar="N", help="Tell it for so many replicas, untried.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Tell it for so many tasks with --join.")] = 1,
    cold: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="Tell a range for a card such as H100, without an engine."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell how long a job takes, and what it costs, by a sample.

    The job's engine answers the sample, 2 % of the rows at most; they are done then, and the run goes on from
    there. Asked again, as with --replicas 8 or other flags of the scheduler, it tells without an engine.

    Example: batchrun estimate jobs/summarize.yaml --price 2.50
    """
    from batchrunner.forecast.estimate import estimate as estimate_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet)
    found = estimate_job(
        job,
        overrides=with_limit(overrides, limit),
        rows=rows,
        price=price,
        replicas=replicas,
        workers=workers,
        cold=cold,
    )
    show(found.as_dict() if as_json else found.lines())


def tune(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all trials, such as 90s, 30m or 2h.")
    ] = "30m",
    allow: Annotated[
        Literal["fp8"] | None,
        typer.Option(metavar="fp8", help="Try 8-bit numbers too, which change answers a little."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest safe flags of SGLang for a job on this machine.

    It tries flags on a sample of the job's rows. Run it again to go on after an interruption, or with a
    larger budget.

    Example: batchrun tune jobs/summarize.yaml --budget 30m
    """
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415
    from batchrunner.runner.tune import parse_budget  # noqa: PLC0415
    from batchrunner.runner.tune import tune as tune_job  # noqa: PLC0415

    log_to_stderr(quiet=True)
    # what its trials' runs say is no news
    logging.getLogger("batchrunner.runner.tune").setLevel(logging.ERROR if quiet else logging.INFO)
    found = tune_job(
        job,
        overrides=with_limit(overrides, limit),
        budget_s=parse_budget(budget),
        allow_fp8=allow == "fp8",
    )
    show(found.as_dict() if as_json else found.lines())


def schema() -> None:
    """Print the JSON Schema of job files, for editors.

    An editor completes and checks job files with it.

    Example: batchrun schema > job.schema.json
    """
    from batchrunner.job.spec import Job  # noqa: PLC0415

    show(Job.model_json_schema())
