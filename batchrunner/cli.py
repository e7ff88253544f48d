"""The command: parse, call, print, exit code. No logic; everything heavy is imported when it is used."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from pathlib import Path

    from batchrunner.core.errors import BatchrunError
    from batchrunner.report.report import Report
    from batchrunner.tune.summary import TuningSummary

EXIT_CODES = """exit codes: 0 done · 1 could not go on (run it again to resume) · 2 the job or its input is
wrong · 3 done, but more rows failed than tolerated · 130/138/143 interrupted (run it again to resume)"""


class _DefaultToRun(TyperGroup):
    """`batchrun JOB.yaml` is `batchrun run JOB.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((arg for arg in args if not arg.startswith("-")), None)
        if first is not None and first not in self.commands and args[0] not in {"--help", "--version"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_DefaultToRun,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Offline batch inference that keeps an SGLang engine at its highest throughput.\n\n"
    "batchrun JOB.yaml runs a job; run it again to resume.\n\nExample: batchrun jobs/summarize.yaml",
    epilog=EXIT_CODES,
)

JobArgument = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job file.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's output path.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override a field of the job; may be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        print(f"batchrun {version('batchrunner')}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def run(
    job: JobArgument,
    overrides: SetOption = None,
    fresh: Annotated[bool, typer.Option(help="Discard what is under output.path and start again.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Send failed rows again.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Do one of N shares of the rows, 0/N to N-1/N; `slurm`: this array task's."
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option(
            "--join", help="Share the rows with all other starts that say --join; each takes what is left."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job, or resume it; `batchrun JOB.yaml` is short for it.

    Example: batchrun jobs/summarize.yaml --set engine.model=Qwen/Qwen3-8B --set input.limit=1000
    """
    from batchrunner.core.errors import BatchrunError  # noqa: PLC0415
    from batchrunner.runner.foreground import run_in_foreground  # noqa: PLC0415

    _log_to_stderr(quiet=quiet)
    try:
        report = run_in_foreground(
            job,
            overrides or [],
            fresh=fresh,
            retry_failed=retry_failed,
            shard=shard,
            join=join,
            quiet=quiet,
            as_json=as_json,
        )
    except BatchrunError as error:
        if error.report is not None and (as_json or not quiet):  # worth knowing, whatever ended it
            _print_report(error.report, quiet=quiet, as_json=as_json)
        _exit_with(error)
    _print_report(report, quiet=quiet, as_json=as_json)
    raise typer.Exit(report.exit_code)


@app.command()
def slurm(
    job: JobArgument,
    array: Annotated[
        str, typer.Option(metavar="RANGE", help="The tasks: 0-15, 1,3,7 or 0-15%4 (four at once).")
    ],
    overrides: SetOption = None,
    partition: Annotated[str | None, typer.Option(help="As sbatch has it.")] = None,
    account: Annotated[str | None, typer.Option(help="As sbatch has it.")] = None,
    gpus_per_task: Annotated[str | None, typer.Option(metavar="N", help="As sbatch has it.")] = None,
    cpus_per_task: Annotated[
        str | None, typer.Option(metavar="N", help="As sbatch has it; 8 per GPU unless given.")
    ] = None,
    mem: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a task, as 200G; 64G per GPU unless given.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="4:00:00", help="Limit of a task, which is then requeued.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of sbatch; may be repeated."),
    ] = None,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", help="Before the time limit, to drain and be requeued in.")
    ] = 120,
    preamble: Annotated[
        str, typer.Option(metavar="TEXT|FILE", help="Shell lines that come first: modules, a container.")
    ] = "",
    static: Annotated[
        bool,
        typer.Option("--static", help="Each task does one share, by its number, not what it can."),
    ] = False,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Submit it, and a job that merges and reports after it."),
    ] = False,
    merge: Annotated[bool, typer.Option(help="Whether --submit submits that job too.")] = True,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the script.")
    ] = None,
) -> None:
    """Write a job as the script of a Slurm array, to standard output or a file, or submit it.

    Example: batchrun slurm jobs/summarize.yaml --array 0-15 --gpus-per-task 1 --time 4:00:00 --submit
    """
    from batchrunner.runner.cluster import slurm as to_slurm  # noqa: PLC0415 - the command starts fast

    planned: to_slurm.SlurmArray = _or_exit(
        to_slurm.plan_array,
        job,
        overrides=overrides or [],
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
    if output is not None:
        _or_exit(to_slurm.save, planned, output)
    elif not submit:
        _print([_or_exit(planned.script)])
    if output is not None or submit:
        _or_exit(to_slurm.make_logs, planned)
    if submit:
        _print(_or_exit(to_slurm.submit, planned, merge=merge))


@app.command()
def check(job: JobArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Validate a job and its input without sending anything; print the first three prompts.

    Example: batchrun check jobs/summarize.yaml
    """
    from batchrunner.runner.check import check as check_job  # noqa: PLC0415

    found = _or_exit(check_job, job, overrides or [])
    _print(found.as_dict() if as_json else found.lines())


@app.command(epilog=EXIT_CODES)
def tune(
    job: JobArgument,
    overrides: SetOption = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="For all trials: 90s, 30m, 2h.")] = "30m",
    allow: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Try these too: quantization (changes answers), torch-compile; or both, with a comma.",
        ),
    ] = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the best flags into the job file; nothing else changes it.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest safe flags of SGLang for a job on this machine, by trials on a sample of its rows.

    Run it again to go on after an interruption, or with a larger budget.

    Example: batchrun tune jobs/summarize.yaml --budget 30m
    """
    from batchrunner.tune.tuner import parse_budget  # noqa: PLC0415
    from batchrunner.tune.tuner import tune as tune_job  # noqa: PLC0415

    _log_to_stderr(quiet=True)
    # what its trials' runs say is no news
    logging.getLogger("batchrunner.tune").setLevel(logging.ERROR if quiet else logging.INFO)
    found: TuningSummary = _or_exit(
        tune_job,
        job,
        overrides=overrides or [],
        budget_s=_or_exit(parse_budget, budget),
        allow=[name.strip() for name in allow.split(",") if name.strip()],
        apply=apply,
    )
    _print(found.as_dict() if as_json else found.lines())


@app.command()
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the state of a run: rows, failures, load, time left. It may be at work in another process.

    Example: batchrun status out/summarize
    """
    from batchrunner.runner.status import status as status_of  # noqa: PLC0415
    from batchrunner.runner.status import status_lines  # noqa: PLC0415

    state = _or_exit(status_of, run)
    _print(state if as_json else status_lines(state))


@app.command()
def merge(run: RunArgument) -> None:
    """Write a run's parts as one dataset in input order, under RUN/merged; exit 1 while rows are missing.

    Example: batchrun merge out/summarize
    """
    from batchrunner.report.merged import MergedRun, merge_run  # noqa: PLC0415

    merged: MergedRun = _or_exit(merge_run, run)
    _tell("\n".join(merged.lines()))
    _print([str(merged.path)])
    raise typer.Exit(merged.exit_code)


@app.command()
def export(
    run: RunArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write, by its ending; - is standard output.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="ENDING", help="csv, jsonl, parquet, arrow, csv.gz, …: whatever FILE is."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a run's results in input order to one CSV, JSON Lines, Parquet or Arrow file.

    The exit code is 1 while rows are missing.

    Example: batchrun export out/summarize answers.csv
    """
    from batchrunner.report.merged import MergedRun, export_run  # noqa: PLC0415

    exported: MergedRun = _or_exit(export_run, run, file, form=form, force=force)
    _tell("\n".join(exported.lines()))
    if file != "-":
        _print([str(exported.path)])
    raise typer.Exit(exported.exit_code)


@app.command()
def report(
    run: RunArgument,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write RUN/report.html for a run that is over, at work or killed; a run writes it at its end too.

    Example: batchrun report out/summarize --open
    """
    from batchrunner.output.run_dir import RunDir  # noqa: PLC0415
    from batchrunner.report.html.page import write_page  # noqa: PLC0415

    page: Path = _or_exit(write_page, RunDir(run))
    _print([str(page)])
    if show:
        typer.launch(str(page))


@app.command()
def advise(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOGFILE|URL|RUN", help="Any SGLang's log, a live server, or a run's output path."
        ),
    ],
    thresholds: Annotated[
        list[str] | None,
        typer.Option("--threshold", metavar="NAME=VALUE", help="Where a sign begins; may be repeated."),
    ] = None,
    span: Annotated[float, typer.Option(metavar="SECONDS", help="How long a live server is watched.")] = 20.0,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU, such as H100, where the source does not tell."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain what an SGLang log, a live server or a run shows, and which flag to change.

    Example: batchrun advise out/summarize
    """
    from batchrunner.advise.advise import advise as judge  # noqa: PLC0415
    from batchrunner.engines.logs.thresholds import Thresholds  # noqa: PLC0415

    limits = _or_exit(Thresholds().with_values, thresholds or [])
    found = _or_exit(judge, source, limits, span_s=span, card=card)
    _print(found.as_dict() if as_json else found.lines())


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors to complete and check them.

    Example: batchrun schema > job.schema.json
    """
    from batchrunner.job.spec import Job  # noqa: PLC0415

    _print(Job.model_json_schema())


def main() -> None:
    """Entry point of `batchrun`."""
    from batchrunner.core.standard_streams import lost_output, open_standard_streams  # noqa: PLC0415

    open_standard_streams()
    code = _run_command()
    if lost := lost_output():
        _tell(f"batchrun: standard output: cannot be written: {lost}")
        code = code or 1
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if code and any(not thread.daemon for thread in others):
        os._exit(code)  # stopped at once: a thread that still works is not waited for
    sys.exit(code)


def _run_command() -> int:
    """Run the command of `sys.argv`; return its exit code, whatever happens."""
    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before the run had its own way with it
        _tell("batchrun: interrupted")
        return 130
    except Exception as failure:  # noqa: BLE001 - nobody foresaw it
        from batchrunner.core.unforeseen import leave_traceback  # noqa: PLC0415

        _tell(f"batchrun: {leave_traceback(failure)}")
        return 1
    return 0


def _or_exit(function: Any, *args: Any, **options: Any) -> Any:
    """Call a function; print a BatchrunError as one line and exit with its code."""
    from batchrunner.core.errors import BatchrunError  # noqa: PLC0415

    try:
        return function(*args, **options)
    except BatchrunError as error:
        _exit_with(error)


def _exit_with(error: BatchrunError) -> NoReturn:
    _tell(f"batchrun: {error}")
    raise typer.Exit(error.exit_code) from None


def _print_report(report: Report, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        _print(report.as_dict())
    elif not quiet or report.exit_code:
        _tell("\n".join(report.lines()))


def _tell(text: str) -> None:
    """Print to standard error, see `StandardStream`: a failure to print changes no exit code."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _print(found: list[str] | dict[str, Any]) -> None:
    if isinstance(found, dict):
        import json  # noqa: PLC0415

        found = [json.dumps(found, indent=2, ensure_ascii=False, default=str)]
    print("\n".join(found))  # noqa: T201


def _log_to_stderr(*, quiet: bool) -> None:
    """Show only batchrunner's log; an engine in this process uses the root logger."""
    ours = logging.getLogger("batchrunner")
    ours.setLevel(logging.ERROR if quiet else logging.INFO)
    from batchrunner.runner.cluster.slurm import task_name  # noqa: PLC0415

    task = task_name(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{task}: %(message)s" if task else None))
    ours.addHandler(handler)
    ours.propagate = False


if __name__ == "__main__":
    main()
