"""The Python functions of a job, and the processes that run them."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchrunner.core.errors import JobError
from batchrunner.core.hook_pool import HookPool
from batchrunner.core.hook_worker import HookFacts, WorkerSetup
from batchrunner.core.media import IMAGE, PDF_FIELD
from batchrunner.job.fields import CHECK, MEDIA, PARSE, PROMPT, PythonFunction, name_of
from batchrunner.job.hook_loading import Annotations, HookFunction, HookKind, annotations_of, load_functions
from batchrunner.job.output import RESULT_COLUMNS
from batchrunner.job.spec import Job

_PREPARE = "batchrunner.input.media.prepare:prepare"
_PACKAGES = {IMAGE.field: ("PIL",), PDF_FIELD: ("PIL", "pypdfium2")}
"""Packages of an extra that a field of the prompt needs; audio and videos need none."""


def open_pool(job: Job) -> HookPool:
    """Start the processes of a job's functions, of which it has one at least, and load these.

    Raises JobError for one that cannot be called.
    """
    functions = []
    if job.prompt.python is not None:
        functions.append(_function(PROMPT, "prompt", job.prompt.python))
    if job.parse is not None:
        functions.append(_function(PARSE, "parse", job.parse))
    if job.check.python is not None:
        functions.append(_function(CHECK, "check", job.check.python))
    if job.prompt.has_media:
        _check_packages(job)
        functions.append(HookFunction(MEDIA, "media", "reading its files", _PREPARE))
    limits = job.limits
    directories = [str(Path(path).absolute()) for path in dict.fromkeys([*job.python_path, str(Path.cwd())])]
    setup = WorkerSetup(
        functools.partial(load_functions, functions),
        ", ".join(function.name for function in functions),
        tuple(directories),
        limits.python,
        int(limits.python_memory_gb * (1 << 30)),
    )
    pool = HookPool(setup, limits.python_processes)
    pool.open()
    try:
        if PARSE in pool.facts:
            _check_columns(job, pool.facts[PARSE])
    except JobError:
        pool.close()
        raise
    return pool


def _check_packages(job: Job) -> None:
    for field in job.prompt.media:
        for module in _PACKAGES.get(field, ()):
            if importlib.util.find_spec(module) is None:
                raise JobError(f"prompt.{field}: needs {module}", hint="install batchrunner[images]")


def _function(where: str, kind: HookKind, function: PythonFunction) -> HookFunction:
    name = name_of(function)
    if isinstance(function, str):
        return HookFunction(where, kind, name, function)
    try:
        known = annotations_of(function)
    except ValueError as failure:
        if kind == "parse":
            raise JobError(f"{where}: {name} {failure}") from None
        known = Annotations()
    return HookFunction(where, kind, name, _pickled(where, name, function), known)


def _pickled(where: str, name: str, function: Callable[..., Any]) -> bytes:
    """Return a function that a program gives, and what it refers to in its main module, as bytes."""
    import cloudpickle  # noqa: PLC0415 - only where a program gives a function

    try:
        content: bytes = cloudpickle.dumps(function)
    except Exception as failure:  # noqa: BLE001 - whatever the function refers to says so in its own way
        why = f"cannot be sent to another process: {type(failure).__name__}: {failure}"
        raise JobError(f"{where}: {name} {why}") from None
    return content


def _check_columns(job: Job, facts: HookFacts) -> None:
    """Raise JobError where a column has a name that results have already."""
    taken = {*RESULT_COLUMNS, *job.output.asked}
    for name, _ in facts.columns:
        if name in {*taken, *job.input.carried_names}:
            raise JobError(
                f"parse: a result has a column {name!r} already",
                hint=f"let {facts.name} name its own otherwise, or rename yours by input.rename",
            )
