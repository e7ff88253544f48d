"""Commands that send rows, or start what answers them: run, batch, engine, serve, slurm, ray."""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from batchrunner.cli.options import (
    BackgroundOption,
    BatchEngineOption,
    FreshOption,
    JobArgument,
    JoinOption,
    JsonOption,
    LimitOption,
    QuietOption,
    RetryFailedOption,
    SetOption,
    VerboseOption,
    with_limit,
)
from batchrunner.core.console import show, tell
from batchrunner.core.errors import BatchrunError, JobError, install_command


@contextlib.contextmanager
def telling_report(*, quiet: bool) -> Iterator[None]:
    """Print the report of a run that could not go on: it is worth knowing, whatever ended it."""
    try:
        yield
    except BatchrunError as error:
        if error.report is not None and not quiet:
            tell(*error.report.lines())
        raise


def _end(done: Any, exit_code: int, shown: list[str], *, quiet: bool, as_json: bool) -> NoReturn:
    """Print what was done, and where results are (`shown`), and end the command."""
    if as_json:
        show(done.as_dict())
    elif not quiet or exit_code:
        tell(*done.lines())
    if shown and not as_json and not quiet:
        show(shown)
    raise typer.Exit(exit_code)


def run(
    job: JobArgument,
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
    """Run a job, or resume it; `batchrun JOB.yaml` is short for it.

    Example: batchrun jobs/summarize.yaml --set engine.model=Qwen/Qwen3-8B --set input.limit=1000
    """
    from batchrunner.runner.foreground import log_to_stderr, run_in_foreground  # noqa: PLC0415

    log_to_stderr(quiet=quiet, verbose=verbose)
    with telling_report(quiet=quiet or as_json):
        done = run_in_foreground(
            job,
            with_limit(overrides, limit, background=background),
            fresh=fresh,
            retry_failed=retry_failed,
            join=join,
            quiet=quiet,
            as_json=as_json,
        )
    _end(done, done.exit_code, [done.results], quiet=quiet, as_json=as_json)


def batch(
    requests: Annotated[str, typer.Argument(metavar="REQUESTS", help="The batch file; also .gz or .zst.")],
    engine: BatchEngineOption,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="RESULTS", help="The file to write."),
    ],
    errors: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where failed lines go, instead of RESULTS."),
    ] = None,
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
    """Answer a batch file in OpenAI's or vLLM's format.

    The run's directory is RESULTS.run. Run it again to resume.

    Example: batchrun batch requests.jsonl -o results.jsonl --engine Qwen/Qwen3-8B
    """
    from batchrunner.runner.batch import run_batch  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(quiet=quiet, verbose=verbose)
    asked = with_limit(overrides, limit, background=background)
    made = {"engine": engine, "overrides": asked}
    with telling_report(quiet=quiet or as_json):
        done = run_batch(
            requests, output, errors, made, fresh=fresh, retry_failed=retry_failed, join=join, quiet=quiet,
            as_json=as_json,
        )  # fmt: skip
    shown = [str(done.results)] if done.is_published else []
    _end(done, done.report.exit_code, shown, quiet=quiet, as_json=as_json)


def engine(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL|JOB.yaml", help="A model's name or directory, or a job."),
    ],
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Start a server as a run would, and print its URL.

    Jobs use it by `--set engine=URL`; Ctrl-C ends it. It has the arguments and the environment of a run, also
    on a CPU. Its API key is that of SGLANG_API_KEY, or a new one, which is shown.

    Example: batchrun engine Qwen/Qwen3-8B --set engine.args.tp-size=2
    """
    from batchrunner.api.runs import open_engine  # noqa: PLC0415 - the command starts fast
    from batchrunner.engines.registry import launched_model  # noqa: PLC0415
    from batchrunner.job.load import load_job  # noqa: PLC0415
    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415

    log_to_stderr(verbose=verbose)
    is_job = source.endswith((".yaml", ".yml", ".json"))
    nothing = {"input": {"path": "-"}, "prompt": {"text": "-"}, "output": {"path": "-"}}
    job = load_job(source if is_job else {**nothing, "engine": source}, overrides=overrides or ())
    if launched_model(job.engine) is None:
        raise JobError(f"engine: kind {job.engine.kind} starts no server", hint="give a model")
    key = os.environ.setdefault("SGLANG_API_KEY", secrets.token_hex(24))
    with open_engine(job.engine, task=job.task) as opened, contextlib.suppress(KeyboardInterrupt):
        tell(f"ready until Ctrl-C; where it is used: export SGLANG_API_KEY={key}")
        show(opened.info.routes)
        threading.Event().wait()


def serve(
    engine: BatchEngineOption,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="The directory of files and batches.")
    ],
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0 takes any free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address of this machine; any but localhost needs BATCHRUN_API_KEY."
        ),
    ] = "127.0.0.1",
    task: Annotated[
        Literal["generate", "embed"], typer.Option(metavar="generate|embed", help="What the model does.")
    ] = "generate",
    max_file_mb: Annotated[int, typer.Option(metavar="N", min=1, help="Largest file, in MB.")] = 1000,
    max_files: Annotated[int, typer.Option(metavar="N", min=1, help="Most files, also of results.")] = 10_000,
    background: BackgroundOption = False,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve OpenAI's Files and Batches on an engine of yours.

    OpenAI's clients take it as base_url. Ctrl-C ends it; start it again to go on.

    Example: batchrun serve --engine Qwen/Qwen3-8B --dir state
    """
    import uvloop  # noqa: PLC0415 - the command starts fast

    from batchrunner.runner.foreground import log_to_stderr  # noqa: PLC0415
    from batchrunner.serve.server import serve as serve_batches  # noqa: PLC0415

    log_to_stderr(verbose=verbose)
    serving = serve_batches(
        engine, directory.expanduser(), host=host, port=port, task=task,
        overrides=with_limit(overrides, None, background=background), most_files=max_files,
        most_bytes=max_file_mb * 1_000_000,
    )  # fmt: skip
    uvloop.run(serving)


def slurm(
    job: JobArgument,
    array: Annotated[
        str,
        typer.Option(metavar="RANGE", help="Tasks, such as 0-15 or 1,3,7; 0-15%4 runs four at once."),
    ],
    sbatch: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Options of sbatch, such as --gpus-per-task=1."),
    ] = None,
    overrides: SetOption = None,
    limit: LimitOption = None,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", help="Stop sending rows so long before the time limit.")
    ] = 120,
    preamble: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Shell lines to begin with, such as 'module load cuda'."),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print a job as the script of a Slurm array, for sbatch.

    Example: batchrun slurm jobs/summarize.yaml --array 0-15 -- --gpus-per-task=1 --time=4:00:00 | sbatch
    """
    from batchrunner.runner.slurm import array_script  # noqa: PLC0415 - the command starts fast

    script = array_script(
        job,
        array=array,
        sbatch=sbatch or [],
        overrides=with_limit(overrides, limit),
        preamble=preamble,
        grace_s=grace,
    )
    show({"script": script} if as_json else script.split("\n"))


def ray(
    job: JobArgument,
    workers: Annotated[
        int,
        typer.Option(metavar="N", help="Workers, each with an engine."),
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The cluster's head node, or `local` for a trial on this machine alone.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(metavar="N", help="Cores that Ray keeps for a worker.")] = 1,
    overrides: SetOption = None,
    limit: LimitOption = None,
    retry_failed: RetryFailedOption = False,
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

    log_to_stderr(quiet=quiet, verbose=verbose)
    try:
        from batchrunner.ray.whole_job import run_on_ray  # noqa: PLC0415 - Ray may be missing
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise JobError("Ray is not installed", hint=install_command("ray")) from None
    with telling_report(quiet=quiet or as_json):
        done = run_on_ray(
            job, with_limit(overrides, limit), workers=workers, address=address, cpus=cpus,
            retry_failed=retry_failed, quiet=quiet, as_json=as_json,
        )  # fmt: skip
    _end(done, done.exit_code, [done.results], quiet=quiet, as_json=as_json)
