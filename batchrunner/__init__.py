"""Offline batch inference that keeps an SGLang engine at its highest throughput.

docs/architecture.md lists the folders of this package. A folder imports only from folders above it in that
list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrunner.api import (
        aembed,
        agenerate,
        arerank,
        arun,
        ascore,
        embed,
        estimate,
        generate,
        open_engine,
        rerank,
        run,
        score,
        stream,
    )
    from batchrunner.core.errors import (
        BatchrunError,
        EngineLostError,
        EngineStartError,
        InputError,
        JobError,
        OutputError,
        ResumeError,
        StorageError,
    )
    from batchrunner.core.rollout_worker import GenerateError
    from batchrunner.job.spec import Job
    from batchrunner.report.report import Report
    from batchrunner.runner.open_engine import OpenEngine
    from batchrunner.runner.progress import Progress

    __version__: str

__all__ = [
    "BatchrunError",
    "EngineLostError",
    "EngineStartError",
    "GenerateError",
    "InputError",
    "Job",
    "JobError",
    "OpenEngine",
    "OutputError",
    "Progress",
    "Report",
    "ResumeError",
    "StorageError",
    "__version__",
    "aembed",
    "agenerate",
    "arerank",
    "arun",
    "ascore",
    "embed",
    "estimate",
    "generate",
    "open_engine",
    "rerank",
    "run",
    "score",
    "stream",
]

_MODULES_OF_CLASSES = {
    "GenerateError": "core.rollout_worker",
    "Job": "job.spec",
    "OpenEngine": "runner.open_engine",
    "Progress": "runner.progress",
    "Report": "report.report",
}
"""Module of each public class. The public functions are in `api`, the error classes in `core.errors`."""


def __getattr__(name: str) -> Any:
    """Import a public name when a program first uses it, so that `import batchrunner` stays fast."""
    if name not in __all__:
        raise AttributeError(f"module 'batchrunner' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("batchrunner")
    from importlib import import_module  # noqa: PLC0415

    is_function = name.islower()
    module = "api" if is_function else _MODULES_OF_CLASSES.get(name, "core.errors")
    return getattr(import_module(f"batchrunner.{module}"), name)


def __dir__() -> list[str]:
    return __all__
