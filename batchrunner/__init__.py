"""Offline batch inference that keeps an SGLang engine at its highest throughput.

docs/architecture.md says what each folder is for; each imports only from those before it in that list.
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

_MODULES = {
    "GenerateError": "core.rollout_worker",
    "Job": "job.spec",
    "OpenEngine": "runner.open_engine",
    "Progress": "runner.progress",
    "Report": "report.report",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import batchrunner` stays instant."""
    if name not in __all__:
        raise AttributeError(f"module 'batchrunner' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("batchrunner")
    from importlib import import_module  # noqa: PLC0415

    home = "api" if name.islower() else _MODULES.get(name, "core.errors")
    return getattr(import_module(f"batchrunner.{home}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
