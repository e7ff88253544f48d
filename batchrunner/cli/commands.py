"""The commands of `batchrun`, with their arguments and options.

This file does not use `from __future__ import annotations`, which keeps annotations as texts. Typer would
evaluate each text four times, which would add 10 ms to every start of the command. For a fast start, too,
heavy modules are imported inside the commands that use them.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from batchrunner.core.console import show, tell
from batchrunner.core.errors import BatchrunError, JobError, install_command

EXIT_CODES = """exit codes: 0 done · 1 could not go on (run it again to resume) · 2 the job or its input is
wrong · 3 done, but more rows failed than tolerated · 130/138/143 interrupted (run it again to resume)"""

JobArgument = Annotated[str, typer.Argument(metavar="JOB.yaml", help="The job file; `-` is standard input.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's output path.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Set a job field, such as input.limit=100; may be repeated.",
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Send only the first N rows."),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Discard earlier results and start from the first row.")
]
JoinOption = Annotated[
    bool,
    typer.Option("--join", help="Share the rows with all workers that are started with --join."),
]
BackgroundOption = Annotated[
    bool,
    typer.Option("--background", help="Use spare capacity of a live server: engine.background=true."),
]
BatchEngineOption = Annotated[
    list[str],
    typer.Option(
        metavar="MODEL|URL|BASE.yaml",
        help="A model, the address of a server (repeat the option for replicas), or a job with an engine.",
    ),
]
RetryFailedOption = Annotated[bool, typer.Option("--retry-failed", help="Retry failed rows.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show notes as well.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result, or the error, as JSON on standard output.")
]


def _all_overrides(overrides: list[str] | None, limit: int | None, *, background: bool = False) -> list[str]:
    """Return the job overrides of `--set`, followed by the overrides for `--limit` and `--background`."""
    all_overrides = [*(overrides or [])]
    if limit is not None:
        all_overrides.append(f"input.limit={limit}")
    if background:
        all_overrides.append("engine.background=true")
    return all_overrides


@contextlib.contextmanager
def reporting_failures(*, quiet: bool) -> Iterator[None]:
    """If a run fails in the block, print its report, because the error lacks the number of finished rows."""
    try:
        yield
    except BatchrunError as error:
        if error.report is not None and not quiet:
            tell(*error.report.lines())
        raise


def _finish(report: Any, *, exit_code: int, results: list[str], quiet: bool, as_json: bool) -> NoReturn:
    """Print a report and the paths of its results, and end the command with the exit code.

    With `quiet`, a report is printed only if the exit code is not 0.
    """
    if as_json:
        show(report.as_dict())
    elif not quiet or exit_code:
        tell(*report.lines())
    if results and not as_json and not quiet:
        show(results)
    raise typer.Exit(exit_code)


def run(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    fresh: FreshOption = False,
    retry_failed: RetryFailedOption = False,
    join: JoinOption = False,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Share the rows among N processes on this machine."),
    ] = None,
    background: BackgroundOption = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST]:PORT", help="Serve metrics for Prometheus during the run, as on :9400."),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run or resume a job; `batchrun JOB.yaml` does the same.

    Example: batchrun jobs/summarize.yaml --set engine.model=Qwen/Qwen3-8B --set input.limit=1000
    """
    from batchrunner.runner.foreground import log_to_stderr, run_in_foreground  # noqa: PLC0415

    log_to_stderr(quiet=quiet, verbose=verbose)
    all_overrides = _all_overrides(overrides, limit, background=background)
    with reporting_failures(quiet=quiet or as_json):
        if processes is not None:
            from batchrunner.runner.local_workers import run_in_processes  # noqa: PLC0415 - for few runs

            if metrics is not None:
                raise JobError("--metrics: shows one process, and --processes starts several")
            report = run_in_processes(
                job,
                all_overrides,
                processes=processes,
                fresh=fresh,
                retry_failed=retry_failed,
                quiet=quiet,
                as_json=as_json,
            )
        else:
            report = run_in_foreground(
                job,
                all_overrides,
                fresh=fresh,
                retry_failed=retry_failed,
                join=join,
                metrics=metrics,
                quiet=quiet,
                as_json=as_json,
            )
    _finish(report, exit_code=report.exit_code, results=[report.results], quiet=quiet, as_json=as_json)


def batch(
    requests: Annotated[str, typer.Argument(metavar="REQUESTS", help="The batch file; also .gz or .zst.")],
    engine: BatchEngineOption,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="RESULTS", help="The file for the results."),
    ],
    errors: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File for failed lines, instead of RESULTS."),
    ] = None,
    allow_repeated: Annotated[
        bool,
        typer.Option("--allow-repeated", help="Also answer lines whose custom_id is that of another line."),
    ] = False,
    overrides: SetOption = None,
    limit: LimitOption = None,
    fresh: FreshOption = False,
    retry_failed: RetryFailedOption = False,
    join: JoinOption = False,
    background: BackgroundOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a batch file in OpenAI's or vLLM's format.

    The run's directory is RESULTS.run. Repeat the command to resume.

    Example: batchrun batch requests.jsonl -o results.jsonl --engine Qwen/Qwen3-8B
    """
    from batchrunner.runner.batch import run_batch  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet, verbose=verbose)
    with reporting_failures(quiet=quiet or as_json):
        batch_run = run_batch(
            requests,
            output,
            errors,
            {
                "engine": engine,
                "overrides": _all_overrides(overrides, limit, background=background),
                "allows_repeated": allow_repeated,
            },
            fresh=fresh,
            retry_failed=retry_failed,
            join=join,
            quiet=quiet,
            as_json=as_json,
        )
    _finish(
        batch_run,
        exit_code=batch_run.report.exit_code,
        results=[str(batch_run.results)] if batch_run.is_published else [],
        quiet=quiet,
        as_json=as_json,
    )


def engine(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL|JOB.yaml", help="A model's name or directory, or a job."),
    ],
    replicas: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Replicas of the model: engine.replicas=N.")
    ] = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="One address for all replicas: engine.gateway=true.")
    ] = False,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Start SGLang servers as a run does, and print their URLs.

    Jobs use a server with `--set engine=URL`; Ctrl-C stops the servers. A server gets the same arguments and
    environment as in a run, also on a CPU. Its API key is the value of SGLANG_API_KEY, or else a new key. The
    command prints the key. With --gateway, the only URL is that of a Model Gateway in front of the servers.

    Example: batchrun engine Qwen/Qwen3-8B --set engine.args.tp-size=2
    """
    from batchrunner.api.runs import open_engine  # noqa: PLC0415
    from batchrunner.engines.registry import launched_model  # noqa: PLC0415
    from batchrunner.job.engine import API_KEY_VARIABLE  # noqa: PLC0415
    from batchrunner.job.load import load_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(verbose=verbose)
    # A job must have an input, a prompt and an output. If `source` is a model, its job gets these
    # placeholders, which are never used.
    unused_parts = {"input": {"path": "-"}, "prompt": {"text": "-"}, "output": {"path": "-"}}
    is_job = source.endswith((".yaml", ".yml", ".json"))
    job_source = source if is_job else {**unused_parts, "engine": source}
    options = []
    if replicas is not None:
        options.append(f"engine.replicas={replicas}")
    if gateway:
        options.append("engine.gateway=true")
    job = load_job(job_source, overrides=[*options, *(overrides or ())])
    if launched_model(job.engine) is None:
        raise JobError(f"engine: kind {job.engine.kind} starts no server", hint="give a model")
    # Each server takes its API key from this environment variable.
    key = os.environ.setdefault(API_KEY_VARIABLE, secrets.token_hex(24))
    with open_engine(job.engine, task=job.task) as open_server, contextlib.suppress(KeyboardInterrupt):
        tell(f"the engine is ready until Ctrl-C; its users need: export {API_KEY_VARIABLE}={key}")
        model_gateway = getattr(open_server.shared.engine, "gateway", None)
        show(open_server.info.routes if model_gateway is None else (model_gateway.url,))
        # The event is never set, so only Ctrl-C ends this wait.
        threading.Event().wait()


def serve(
    engine: BatchEngineOption,
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Directory for files and batches.")],
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0 takes any free port.")
    ] = 8000,
    host: Annotated[
        str,
        typer.Option(metavar="HOST", help="Address to listen on; any but localhost needs a key."),
    ] = "127.0.0.1",
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYS.yaml", help="File with the owners' keys, shares and limits. SIGHUP reads it again."
        ),
    ] = None,
    task: Annotated[
        Literal["generate", "embed", "classify", "rerank"],
        typer.Option(metavar="generate|embed|classify|rerank", help="Task of the model."),
    ] = "generate",
    max_file_mb: Annotated[int, typer.Option(metavar="N", min=1, help="Size limit of a file, in MB.")] = 1000,
    max_files: Annotated[
        int, typer.Option(metavar="N", min=1, help="Limit of files, results included.")
    ] = 10_000,
    background: BackgroundOption = False,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve OpenAI's Files and Batches API on your own engine.

    Clients take the printed address as base_url. Ctrl-C stops the server; a new start resumes its batches.

    Example: batchrun serve --engine Qwen/Qwen3-8B --dir state
    """
    import uvloop  # noqa: PLC0415

    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415
    from batchrunner.serve.server import serve as serve_batches  # noqa: PLC0415

    log_to_stderr(verbose=verbose)
    server = serve_batches(
        engine,
        directory.expanduser(),
        host=host,
        port=port,
        keys=keys and keys.expanduser(),
        task=task,
        overrides=_all_overrides(overrides, None, background=background),
        most_files=max_files,
        most_bytes=max_file_mb * 1_000_000,
    )
    uvloop.run(server)


def slurm(
    job: JobArgument,
    array: Annotated[
        str,
        typer.Option(
            metavar="RANGE", help="Tasks of the array, such as 0-15 or 1,3,7; 0-15%4 runs four at once."
        ),
    ],
    sbatch: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Options for sbatch, such as --gpus-per-task=1."),
    ] = None,
    overrides: SetOption = None,
    limit: LimitOption = None,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", help="Stop sending rows this long before the time limit.")
    ] = 120,
    preamble: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Shell lines to run first, such as 'module load cuda'."),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print a Slurm array script of a job, for sbatch.

    Example: batchrun slurm jobs/summarize.yaml --array 0-15 -- --gpus-per-task=1 --time=4:00:00 | sbatch
    """
    from batchrunner.runner.slurm import array_script  # noqa: PLC0415

    script = array_script(
        job,
        array=array,
        sbatch=sbatch or [],
        overrides=_all_overrides(overrides, limit),
        preamble=preamble,
        grace_s=grace,
    )
    show({"script": script} if as_json else script.split("\n"))


def ray(
    job: JobArgument,
    workers: Annotated[
        int,
        typer.Option(metavar="N", help="Workers, each with its own engine."),
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Head node of the cluster, or `local` for a test on this machine.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(metavar="N", help="Cores that Ray reserves for each worker.")] = 1,
    overrides: SetOption = None,
    limit: LimitOption = None,
    retry_failed: RetryFailedOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run or resume a job on a Ray cluster.

    Workers share the rows; Ray replaces a worker that dies. All nodes need access to input and output, in a
    shared file system or an object store.

    Example: batchrun ray jobs/summarize.yaml --workers 8 --address 10.0.0.1:6379
    """
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet, verbose=verbose)
    try:
        from batchrunner.ray.whole_job import run_on_ray  # noqa: PLC0415 - Ray may be missing
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise JobError("Ray is not installed", hint=install_command("ray")) from None
    with reporting_failures(quiet=quiet or as_json):
        report = run_on_ray(
            job,
            _all_overrides(overrides, limit),
            workers=workers,
            address=address,
            cpus=cpus,
            retry_failed=retry_failed,
            quiet=quiet,
            as_json=as_json,
        )
    _finish(report, exit_code=report.exit_code, results=[report.results], quiet=quiet, as_json=as_json)


def init(
    data: Annotated[str, typer.Argument(metavar="FILE", help="Input data: a file, a directory or a glob.")],
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="Engine of the job: server or simulated.")
    ] = "server",
) -> None:
    """Print a commented first job for a data file.

    Example: batchrun init docs.parquet > job.yaml
    """
    from batchrunner.input.new_job import new_job  # noqa: PLC0415
    from batchrunner.job.fields import user_path  # noqa: PLC0415
    from batchrunner.runner.prepare import with_merged_results  # noqa: PLC0415

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
    """Validate a job or batch file, show three prompts, send nothing.

    The command reads the first 1,000 rows, or all requests of a batch file, and counts those that cannot be
    sent. The exit code is 3 if none can be sent.

    Example: batchrun check jobs/summarize.yaml
    """
    from batchrunner.runner.check import check as check_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    # The log shows what the job's Python functions print.
    log_to_stderr()
    result = check_job(job, _all_overrides(overrides, limit))
    show(result.as_dict() if as_json else result.lines())
    raise typer.Exit(result.exit_code)


def estimate(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    rows: Annotated[int, typer.Option(metavar="N", help="Size limit of the sample, in rows.")] = 500,
    price: Annotated[
        float | None, typer.Option(metavar="P", help="Price of one GPU-hour, to estimate the cost.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(metavar="N", help="Estimate for this many replicas, without a trial.")
    ] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Estimate for this many workers with --join.")
    ] = 1,
    cold: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="Estimate a range for a GPU such as H100, without an engine."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate time and cost of a job from a sample of its rows.

    The job's engine answers the sample, at most 2 % of the rows; the run keeps these answers. Later
    estimates, such as with --replicas 8 or other scheduler flags, need no engine.

    Example: batchrun estimate jobs/summarize.yaml --price 2.50
    """
    from batchrunner.forecast.estimate import estimate as estimate_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet)
    result = estimate_job(
        job,
        overrides=_all_overrides(overrides, limit),
        rows=rows,
        price=price,
        replicas=replicas,
        workers=workers,
        cold=cold,
    )
    show(result.as_dict() if as_json else result.lines())


def tune(
    job: JobArgument,
    overrides: SetOption = None,
    limit: LimitOption = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all trials, such as 90s, 30m or 2h.")
    ] = "30m",
    allow: Annotated[
        Literal["fp8"] | None,
        typer.Option(metavar="fp8", help="Also try FP8, which changes answers slightly."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest safe flags of SGLang for a job on this machine.

    Each trial runs a sample of the job's rows. Repeat the command to resume after an interruption, or with a
    larger budget.

    Example: batchrun tune jobs/summarize.yaml --budget 30m
    """
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415
    from batchrunner.runner.tune import parse_budget  # noqa: PLC0415
    from batchrunner.runner.tune import tune as tune_job  # noqa: PLC0415

    log_to_stderr(quiet=True)
    # The logs of the trials' runs would hide this command's own log, so they are not shown.
    logging.getLogger("batchrunner.runner.tune").setLevel(logging.ERROR if quiet else logging.INFO)
    result = tune_job(
        job,
        overrides=_all_overrides(overrides, limit),
        budget_s=parse_budget(budget),
        allow_fp8=allow == "fp8",
    )
    show(result.as_dict() if as_json else result.lines())


def schema() -> None:
    """Print the JSON Schema of job files.

    Editors complete and check job files with it.

    Example: batchrun schema > job.schema.json
    """
    from batchrunner.job.spec import Job  # noqa: PLC0415

    show(Job.model_json_schema())


def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the state of a run: rows, failures, load, time left.

    The run may be active in another process, or on another machine that shares its path.

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
        typer.Argument(metavar="FILE|URI", help="File or dataset to write, such as answers.csv."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE or URI if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's results in input order: RUN/merged, or one file.

    RUN/merged is a dataset of Parquet files. The ending of FILE selects CSV, JSON Lines, Parquet or Arrow,
    and compression. To a URI, hf://datasets/OWNER/NAME or s3://BUCKET/DIR, RUN/merged is uploaded with a
    README that has model, prompt and settings. The exit code is 1 while rows are missing.

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
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="The run's output path; several are compared.")
    ],
    in_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the report page of a run, or compare several runs.

    The page is RUN/report.html. A run may be finished, active or killed. The comparison has the figures of
    each run, the settings that differ, and the answers of the same rows.

    Example: batchrun report out/summarize --open
    """
    from batchrunner.output.run_dir import look_at_run  # noqa: PLC0415
    from batchrunner.report.compare import compare  # noqa: PLC0415
    from batchrunner.report.html.page import write_page  # noqa: PLC0415

    if len(runs) > 1:
        comparison = compare(runs)
        show(comparison.as_dict() if as_json else comparison.lines())
        return
    run_dir = look_at_run(runs[0])
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
            help="An SGLang log, the address of a server, or the path of a run.",
        ),
    ],
    span: Annotated[float, typer.Option(metavar="SECONDS", help="Time to watch a server.")] = 20.0,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The GPU, such as H100, if neither log nor run names it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend SGLang flags from a log, a server or a run.

    Example: batchrun advise out/summarize
    """
    from batchrunner.runner.advise import advise as judge  # noqa: PLC0415

    result = judge(source, span_s=span, card=card)
    show(result.as_dict() if as_json else result.lines())
