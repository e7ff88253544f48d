"""Starts the worker processes that run the Python functions of a job."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from batchrunner.core.errors import JobError, install_command
from batchrunner.core.media import IMAGE, PDF_FIELD
from batchrunner.core.types import CHECK, MEDIA, PARSE, PROMPT, ROLLOUT
from batchrunner.job.fields import PythonFunction, name_of
from batchrunner.job.output import REQUEST_DIGEST, RESULT_COLUMNS, ROLLOUT_COLUMNS, TURNS
from batchrunner.job.spec import Job

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.core.hook_protocol import HookFacts
    from batchrunner.job.hook_loading import HookFunction

_PREPARE = "batchrunner.input.media.prepare:prepare"
"""Function of this package that reads the images, audio, videos and documents of a row.

Like a job's own functions, it runs in a worker process.
"""
_PACKAGES = {IMAGE.field: ("PIL",), PDF_FIELD: ("PIL", "pypdfium2")}
"""Optional packages that a field of `prompt` needs. Audio and videos need none."""


def open_functions(job: Job) -> HookPool | None:
    """Start the worker processes of a job, which load its Python functions; None if the job needs none.

    Raises JobError for a function that cannot be loaded or called.
    """
    functions_by_field = {
        PROMPT: job.prompt.python,
        PARSE: job.parse,
        CHECK: job.accept.python,
        ROLLOUT: job.prompt.rollout,
    }
    user_functions = {
        field: function for field, function in functions_by_field.items() if function is not None
    }
    if not user_functions and not job.prompt.media:
        return None
    from batchrunner.core.hook_pool import HookPool  # noqa: PLC0415 - few jobs have functions
    from batchrunner.core.hook_protocol import WorkerSetup  # noqa: PLC0415
    from batchrunner.job.hook_loading import HookFunction, load_functions  # noqa: PLC0415

    hooks = [_hook(field, function) for field, function in user_functions.items()]
    if job.prompt.media:
        _check_packages(job)
        # This name fits into messages such as `prompt: reading its files: took more than 30 s`.
        hooks.append(HookFunction(MEDIA, "reading its files", _PREPARE))
    limits = job.limits
    directories = [str(Path(path).absolute()) for path in dict.fromkeys([*job.python_path, str(Path.cwd())])]
    setup = WorkerSetup(
        load=functools.partial(load_functions, hooks),
        names=", ".join(hook.name for hook in hooks),
        directories=tuple(directories),
        limit_s=limits.python,
        memory_bytes=int(limits.python_memory_gb * (1 << 30)),
    )
    pool = HookPool(setup, limits.python_processes)
    pool.open()
    try:
        for facts in pool.facts.values():
            _check_columns(job, facts)
    except JobError:
        pool.close()
        raise
    return pool


def _check_packages(job: Job) -> None:
    """Raise JobError if a package for reading the files in prompts is not installed."""
    for field in job.prompt.media:
        for module in _PACKAGES.get(field, ()):
            if importlib.util.find_spec(module) is None:
                raise JobError(
                    f"prompt.{field}: the package {module} is not installed", hint=install_command("images")
                )


def _hook(where: str, function: PythonFunction) -> HookFunction:
    """Return a function of the job field `where` as it is sent to a worker process.

    Raises JobError if a function that a program passes cannot be sent to another process.
    """
    from batchrunner.core.hook_protocol import HookLoadError  # noqa: PLC0415
    from batchrunner.job.hook_loading import HookFunction, annotations_for, code_digest  # noqa: PLC0415

    name = name_of(function)
    if isinstance(function, str):
        return HookFunction(where, name, function)
    import cloudpickle  # noqa: PLC0415 - only for a function that a program passes

    try:
        # Another process may not know the function's source, or the names in its annotations.
        annotations, digest = annotations_for(function, where), code_digest(function)
        return HookFunction(where, name, cloudpickle.dumps((function, annotations, digest)))
    except HookLoadError as failure:
        raise JobError(f"{where}: {name} {failure}") from None
    except Exception as failure:  # noqa: BLE001 - pickling an object may raise any error
        reason = f"cannot be sent to another process: {type(failure).__name__}: {failure}"
        raise JobError(f"{where}: {name} {reason}") from None


def _check_columns(job: Job, facts: HookFacts) -> None:
    """Raise JobError if a function returns a column whose name the results already use."""
    used_names = {*RESULT_COLUMNS, REQUEST_DIGEST, *job.output.asked, *job.input.carried_names}
    if facts.where == ROLLOUT:  # A rollout function may replace the column `turns`.
        used_names |= {*ROLLOUT_COLUMNS} - {TURNS}
    for name, _ in facts.columns:
        if name in used_names:
            raise JobError(
                f"{facts.where}: the results already have a column {name!r}",
                hint=f"rename the column that {facts.name} returns, or the input column by input.rename",
            )
