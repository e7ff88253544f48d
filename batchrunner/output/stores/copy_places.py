"""Where the working copies of a run lie on this machine: each task has its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CopyPlaces:
    """The working copies of one run."""

    directory: Path
    name: str
    """Name of the run's copies, other than those of other runs."""
    main: str
    """Name of the task of a run that is not divided, whose copy has no other name."""

    def of(self, task: str) -> Path:
        """Return the working copy of a task, which may not exist."""
        return self.directory / (self.name if task == self.main else f"{self.name}-{task}")

    def journals(self, task: str) -> list[Path]:
        """Return the journals that a task of this machine has left, oldest first."""
        return sorted(self.of(task).glob(f"tasks/{task}/journal-*"))

    def discard(self, task: str) -> None:
        """Delete the working copy of a task; errors are ignored."""
        shutil.rmtree(self.of(task), ignore_errors=True)
