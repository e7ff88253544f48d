"""Addresses of data sets on the Hugging Face Hub, which the merged results are pushed to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from batchrunner.core.errors import WrongValueError

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
"""A part of the name of a data set, by the rules of the Hub: at most 96 characters."""
_ADDRESS = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^/@\s]+))?(?:/(?P<folder>[^\s].*?))?/*",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder of a data set on the Hub."""

    repo: str
    """OWNER/NAME."""
    revision: str | None
    """Branch; None for `main`."""
    folder: str
    """Path in the data set; "" for its root."""

    def __str__(self) -> str:
        branch = f"@{self.revision}" if self.revision else ""
        return f"hf://datasets/{self.repo}{branch}/{self.folder}".rstrip("/")

    def file(self, name: str) -> str:
        """Return the path in the data set of a file of the folder."""
        return f"{self.folder}/{name}" if self.folder else name


def hub_folder(given: str) -> HubFolder:
    """Return the folder that an address names; raises ValueError. A slash in a branch's name is `%2F`."""
    found = _ADDRESS.fullmatch(given)
    folder = (found["folder"] or "").split("/") if found else []
    if found is None or (folder != [""] and {"", ".", ".."} & {*folder}):
        raise WrongValueError(
            f"{given!r} is no data set of the Hugging Face Hub",
            hint="write it as hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME/FOLDER",
        )
    revision = found["revision"]
    return HubFolder(found["repo"], revision and revision.replace("%2F", "/"), found["folder"] or "")


def _checked(given: str) -> str:
    hub_folder(given)
    return given


HubAddress: TypeAlias = Annotated[str, AfterValidator(_checked)]
"""`hf://datasets/OWNER/NAME[@BRANCH][/FOLDER]`."""
