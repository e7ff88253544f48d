"""The command: parse, call, print, exit code. No logic; everything heavy is imported when it is used."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Annotated

import typer

from batchrunner.core.command_group import HELP_OPTIONS, CommandGroup
from batchrunner.core.command_options import (
    EXIT_CODES,
    JobArgument,
    JsonOption,
    LimitOption,
    NoPythonOption,
    QuietOption,
    RunArgument,
    SetOption,
    with_limit,
)
from batchrunner.core.console import show, tell
from batchrunner.core.entry import start
from batchrunner.core.errors import BatchrunError

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
        from batchrunner.core.versions import version_lines  # noqa: PLC0415

        show(version_lines())
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def _telling_report(*, quiet: bool) -> Iterator[None]:
    """Print the report of a run that could not go on: it is worth knowing, whatever ended it."""
    try:
        yield
    except BatchrunError as error:
        if error.report is not None and not quiet:
            tell("\n".join(error.report.lines()))
        raise


@app.command(epilog=EXIT_CODES)
def run(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    fresh: Annotated[bool, typer.Option(help="Discard what is under output.path and start again.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Send failed rows again.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Do one of N fixed shares of the rows, such as 3/16 (0/16 to 15/16); "
            "`slurm` takes the number of the array task.",
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option(
            "--join", help="Share the rows with all other starts that say --join; each takes what is left."
        ),
    ] = False,
    no_python: NoPythonOption = False,
    quiet: QuietOption = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show all log lines on a terminal, not only the first three."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job, or resume it; `batchrun JOB.yaml` is short for it.

    Example: batchrun jobs/summarize.yaml --set engine.model=Qwen/Qwen3-8B --set input.limit=1000
    """
    from batchrunner.runner.foreground import log_to_stderr, run_in_foreground  # noqa: PLC0415

    log_to_stderr(quiet=quiet, details=verbose or as_json)
    with _telling_report(quiet=quiet or as_json):
        done = run_in_foreground(
            job,
            with_limit(overrides, limit),
            fresh=fresh,
            retry_failed=retry_failed,
            shard=shard,
            join=join,
            no_python=no_python,
            quiet=quiet,
            as_json=as_json,
        )
    if as_json:
        show(done.as_dict())
    elif not quiet or done.exit_code:
        tell("\n".join(done.lines()))
    if not as_json and not quiet:
        show([done.results])
    raise typer.Exit(done.exit_code)


@app.command(epilog=EXIT_CODES)
def batch(
    requests: Annotated[
        str, typer.Argument(metavar="REQUESTS", help="The batch file, in OpenAI's format; also .gz or .zst.")
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="RESULTS", help="The file to write when all lines are done."),
    ],
    errors: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where failed lines go; without it they are in RESULTS too."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Start a server for this model; `simulated` invents answers."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Use the server at this address; may be repeated for replicas."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="BASE.yaml", help="Use the engine, limits and order of this job."),
    ] = None,
    overrides: SetOption = None,
    limit: LimitOption = None,
    skip_bad_lines: Annotated[
        bool,
        typer.Option("--skip-bad-lines", help="Let lines that are no requests fail, and send the others."),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard RESULTS.run and start again.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Send failed lines again.")] = False,
    join: Annotated[
        bool,
        typer.Option("--join", help="Share the lines with all other starts that say --join."),
    ] = False,
    quiet: QuietOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all log lines on a terminal too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer the requests of a batch file in OpenAI's format (also vLLM's run-batch); run it again to resume.

    The run's directory is RESULTS.run.

    Example: batchrun batch requests.jsonl -o results.jsonl --model Qwen/Qwen3-8B
    """
    from batchrunner.runner.batch import prepare_batch, run_batch  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet, details=verbose or as_json)
    files, made = prepare_batch(
        requests,
        output,
        errors,
        model=model,
        urls=url or [],
        base=job,
        lenient=skip_bad_lines,
        overrides=with_limit(overrides, limit),
        fresh=fresh,
    )
    with _telling_report(quiet=quiet or as_json):
        done = run_batch(
            files, made, fresh=fresh, retry_failed=retry_failed, join=join, quiet=quiet, as_json=as_json
        )
    if as_json:
        show(done.as_dict())
    elif not quiet or done.report.exit_code:
        tell("\n".join(done.lines()))
    if not as_json and not quiet and done.is_published:
        show([str(files.results)])
    raise typer.Exit(done.report.exit_code)


@app.command()
def slurm(
    job: JobArgument,
    array: Annotated[
        str,
        typer.Option(
            metavar="RANGE", help="Numbers of the tasks, such as 0-15 or 1,3,7; 0-15%4 runs four at once."
        ),
    ],
    overrides: SetOption = None,
    limit: LimitOption = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Partition; unless given, Slurm's default.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Account; unless given, Slurm's default.")
    ] = None,
    gpus_per_task: Annotated[
        str | None, typer.Option(metavar="N", help="GPUs of each task, such as 1; none unless given.")
    ] = None,
    cpus_per_task: Annotated[
        str | None, typer.Option(metavar="N", help="Cores of each task; 8 for each GPU unless given.")
    ] = None,
    mem: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of each task, such as 200G; 64G for each GPU unless given."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time limit of each task, such as 4:00:00; it is requeued if rows are left."
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Another option of sbatch, such as qos=high; may be repeated."
        ),
    ] = None,
    no_python: NoPythonOption = False,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", help="Time before the limit at which a task stops sending rows.")
    ] = 120,
    preamble: Annotated[
        str,
        typer.Option(metavar="TEXT|FILE", help="Shell lines that come first, such as 'module load cuda'."),
    ] = "",
    static: Annotated[
        bool,
        typer.Option(
            "--static", help="Each task does a fixed share, by its number, instead of what is left."
        ),
    ] = False,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Submit the script, and a job that merges and reports after it."),
    ] = False,
    merge: Annotated[bool, typer.Option(help="Whether --submit submits that job too.")] = True,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write the script; standard output unless given."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a job as the script of a Slurm array, or submit it.

    Example: batchrun slurm jobs/summarize.yaml --array 0-15 --gpus-per-task 1 --time 4:00:00 --submit
    """
    from batchrunner.runner.cluster import slurm as to_slurm  # noqa: PLC0415 - the command starts fast

    planned = to_slurm.plan_array(
        job,
        overrides=with_limit(overrides, limit),
        no_python=no_python,
        preamble=preamble,
        array=array,
        partition=partition,
        account=account,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        mem=mem,
        time=time,
        sbatch=sbatch or [],
        grace_s=grace,
        static=static,
    )
    script = planned.script()
    if output is not None:
        to_slurm.save(planned, output)
    if output is not None or submit:
        to_slurm.make_logs(planned)
    submitted = to_slurm.submit(planned, merge=merge) if submit else []
    if as_json:
        logs = str(planned.logs)
        show(
            {"script": script, "file": output, "run": str(planned.run), "logs": logs, "submitted": submitted}
        )
    elif submit or output is None:
        show(submitted or [script])


@app.command()
def init(
    data: Annotated[str, typer.Argument(metavar="FILE", help="The data: a file, a directory or a glob.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="JOB.yaml", help="Where to write the job; - prints it.")
    ] = "job.yaml",
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="Engine of the job: server or simulated.")
    ] = "server",
    as_json: JsonOption = False,
) -> None:
    """Write a commented job for a data file, with its columns.

    An existing file is not overwritten.

    Example: batchrun init docs.parquet
    """
    from batchrunner.input.new_job import new_job, save  # noqa: PLC0415

    made = new_job(data, engine)
    if output != "-":
        save(made, output)
        tell(made.next_steps(output))
    shown = made.text.rstrip("\n") if output == "-" else output
    show(made.as_dict(output) if as_json else [shown])


@app.command()
def check(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    no_python: NoPythonOption = False,
    as_json: JsonOption = False,
) -> None:
    """Validate a job and show its first three prompts; send nothing.

    The first 1,000 rows are rendered, to count those that cannot be sent.

    Example: batchrun check jobs/summarize.yaml
    """
    from batchrunner.runner.check import check as check_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=False, details=False)  # what the job's Python functions print
    found = check_job(job, with_limit(overrides, limit), no_python=no_python)
    show(found.as_dict() if as_json else found.lines())


@app.command(epilog=EXIT_CODES)
def tune(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all trials together, such as 90s, 30m or 2h.")
    ] = "30m",
    allow: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Try these too: quantization (changes answers), torch-compile or both, with a comma.",
        ),
    ] = "",
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Write the best flags into the job file, which is else left as it is."),
    ] = False,
    no_python: NoPythonOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest safe flags of SGLang for a job on this machine.

    It tries flags on a sample of the job's rows. Run it again to go on after an interruption, or with a
    larger budget.

    Example: batchrun tune jobs/summarize.yaml --budget 30m
    """
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415
    from batchrunner.tune.tuner import parse_budget  # noqa: PLC0415
    from batchrunner.tune.tuner import tune as tune_job  # noqa: PLC0415

    log_to_stderr(quiet=True)
    # what its trials' runs say is no news
    logging.getLogger("batchrunner.tune").setLevel(logging.ERROR if quiet else logging.INFO)
    found = tune_job(
        job,
        overrides=with_limit(overrides, limit),
        budget_s=parse_budget(budget),
        allow=[name.strip() for name in allow.split(",") if name.strip()],
        apply=apply,
        no_python=no_python,
    )
    show(found.as_dict() if as_json else found.lines())


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the state of a run: rows, failures, load, time left.

    The run may be at work in another process, or on another machine that shares its path.

    Example: batchrun status out/summarize
    """
    from batchrunner.runner.status import status as status_of  # noqa: PLC0415
    from batchrunner.runner.status import status_lines  # noqa: PLC0415

    state = status_of(run)
    show(state if as_json else status_lines(state))


@app.command()
def merge(run: RunArgument, as_json: JsonOption = False) -> None:
    """Write a run's results as one dataset in input order: RUN/merged.

    The exit code is 1 while rows are missing.

    Example: batchrun merge out/summarize
    """
    from batchrunner.report.merged import merge_run  # noqa: PLC0415

    merged = merge_run(run)
    if not as_json:
        tell("\n".join(merged.lines()))
    show(merged.as_dict() if as_json else [str(merged.path)])
    raise typer.Exit(merged.exit_code)


@app.command()
def export(
    run: RunArgument,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The file to write, such as answers.csv; - is standard output."),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="ENDING",
            help="Format, such as csv, jsonl.gz, parquet or arrow; the ending of FILE unless given.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's results in input order to one file.

    The file is CSV, JSON Lines, Parquet or Arrow, by its ending, also compressed. The exit code is 1 while
    rows are missing.

    Example: batchrun export out/summarize answers.csv
    """
    from batchrunner.report.merged import export_run  # noqa: PLC0415

    exported = export_run(run, file, form=form, force=force)
    if not as_json:
        tell("\n".join(exported.lines()))
    if file != "-":  # else standard output has the rows
        show(exported.as_dict() if as_json else [str(exported.path)])
    raise typer.Exit(exported.exit_code)


@app.command()
def report(
    run: RunArgument,
    in_browser: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the page of a run: RUN/report.html.

    The run may be over, at work or killed. A run writes the page at its end too.

    Example: batchrun report out/summarize --open
    """
    from batchrunner.output.run_dir import RunDir  # noqa: PLC0415
    from batchrunner.report.html.page import write_page  # noqa: PLC0415

    page = str(write_page(RunDir(run)))
    show({"page": page} if as_json else [page])
    if in_browser:
        typer.launch(page)


@app.command()
def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOGFILE|URL|RUN",
            help="A log of SGLang, a server such as http://host:30000, or a run's output path.",
        ),
    ],
    thresholds: Annotated[
        list[str] | None,
        typer.Option(
            "--threshold",
            metavar="NAME=VALUE",
            help="Set where a sign begins, such as frequent=0.1; may be repeated.",
        ),
    ] = None,
    span: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for which a live server is watched.")
    ] = 20.0,
    card: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The GPU, such as H100, where the log or the server does not tell."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which SGLang flag to change, from a log, a server or a run.

    Example: batchrun advise out/summarize
    """
    from batchrunner.advise.advise import advise as judge  # noqa: PLC0415
    from batchrunner.engines.logs.thresholds import Thresholds  # noqa: PLC0415

    found = judge(source, Thresholds().with_values(thresholds or []), span_s=span, card=card)
    show(found.as_dict() if as_json else found.lines())


@app.command()
def schema(_: JsonOption = False) -> None:
    """Print the JSON Schema of job files, for editors.

    An editor completes and checks job files with it. --json changes nothing.

    Example: batchrun schema > job.schema.json
    """
    from batchrunner.job.spec import Job  # noqa: PLC0415

    show(Job.model_json_schema())


def main() -> None:
    """Entry point of `batchrun`."""
    start(app)


if __name__ == "__main__":
    main()
