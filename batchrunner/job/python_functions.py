"""Python functions of a job: opens the processes that run them."""

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
_PACKAGES = {IMAGE.field: ("PIL",), PDF_FIELD: ("PIL", "pypdfium2")}
"""Packages that a field of the prompt needs from an extra; audio and videos need none."""


def open_functions(job: Job) -> HookPool | None:
    """Start the processes of a job's Python functions and load the functions; None for a job without any.

    Raises JobError for a function that cannot be loaded or called.
    """
    by_place = {
        PROMPT: job.prompt.python,
        PARSE: job.parse,
        CHECK: job.accept.python,
        ROLLOUT: job.prompt.rollout,
    }
    user_functions = {place: function for place, function in by_place.items() if function is not None}
    if not user_functions and not job.prompt.media:
        return None
    from batchrunner.core.hook_pool import HookPool  # noqa: PLC0415 - few jobs have functions
    from batchrunner.core.hook_protocol import WorkerSetup  # noqa: PLC0415
    from batchrunner.job.hook_loading import HookFunction, load_functions  # noqa: PLC0415

    hooks = [_hook(place, function) for place, function in user_functions.items()]
    if job.prompt.media:
        _check_packages(job)
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
    for field in job.prompt.media:
        for module in _PACKAGES.get(field, ()):
            if importlib.util.find_spec(module) is None:
                raise JobError(f"prompt.{field}: needs {module}", hint=install_command("images"))


def _hook(where: str, function: PythonFunction) -> HookFunction:
    """Return a function in the form in which a worker loads it; raises JobError."""
    from batchrunner.core.hook_protocol import HookLoadError  # noqa: PLC0415
    from batchrunner.job.hook_loading import HookFunction, code_digest, known_of  # noqa: PLC0415

    name = name_of(function)
    if isinstance(function, str):
        return HookFunction(where, name, function)
    import cloudpickle  # noqa: PLC0415 - only where a program gives a function

    try:  # the names in its annotations, and its source, may be known only in this process
        facts = known_of(function, where), code_digest(function)
        return HookFunction(where, name, cloudpickle.dumps((function, *facts)))
    except HookLoadError as failure:
        raise JobError(f"{where}: {name} {failure}") from None
    except Exception as failure:  # noqa: BLE001 - whatever the function refers to says so in its own way
        why = f"cannot be sent to another process: {type(failure).__name__}: {failure}"
        raise JobError(f"{where}: {name} {why}") from None


def _check_columns(job: Job, facts: HookFacts) -> None:
    """Raise JobError if a column has a name that results use already."""
    used_names = {*RESULT_COLUMNS, REQUEST_DIGEST, *job.output.asked, *job.input.carried_names}
    if facts.where == ROLLOUT:
        used_names |= {*ROLLOUT_COLUMNS} - {TURNS}
    for name, _ in facts.columns:
        if name in used_names:
            raise JobError(
                f"{facts.where}: a result has a column {name!r} already",
                hint=f"rename the column that {facts.name} returns, or that of the input by input.rename",
            )
