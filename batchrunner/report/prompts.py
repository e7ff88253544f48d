"""The prompts of a few rows of a run, rendered again from its input: results do not hold them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

from batchrunner.core.types import Request, RequestBody
from batchrunner.input.dataset import Dataset
from batchrunner.input.render import Renderer
from batchrunner.input.request_bodies import prompt_of
from batchrunner.job.load import load_job

log = logging.getLogger(__name__)

SHOWN = 400
"""Characters of a prompt that are shown."""
_OF_ANSWERS = {"parse", "check", "on_length"}
"""Parts of a job that no prompt depends on; they may name a function of a program, which no file has."""


def prompts_of(facts: Mapping[str, Any], rows: Sequence[int], copies: Path | None = None) -> dict[int, str]:
    """Return the beginnings of the prompts of these rows (ordinals), as far as they can be known.

    `facts` is the content of run.json, and `copies` the directory of Parquet copies of its files. A row is
    left out where its input is gone or has changed, and where the row cannot be sent.
    """
    found: dict[int, str] = {}
    try:
        job = load_job({k: v for k, v in facts["job"].items() if k not in _OF_ANSWERS}, environ={})
        if job.prompt.python is not None:  # nothing in a run directory is to be run
            return found
        first = 0
        for file in facts["fingerprint"]["files"]:
            inside = BitMap64(row - first for row in rows if first <= row < first + file["rows"])
            if inside:
                dataset = Dataset(file["path"], types=job.input.types, batch=job.prompt.batch, copies=copies)
                if dataset.files[0].digest == file["digest"]:
                    renderer = Renderer(dataset, job.input, job.prompt, job.sampling)
                    for batch in dataset.read(inside, renderer.columns):
                        items = renderer.render(batch)
                        found |= {first + i.ref.row: _text(i) for i in items if isinstance(i, Request)}
            first += file["rows"]
    except Exception as failure:  # noqa: BLE001 - the page is worth more than the prompts on it
        log.debug("no prompts: %s", failure)
    return found


def _text(request: Request) -> str:
    """Return a prompt as a person reads it."""
    if isinstance(request.prompt, RequestBody):
        return prompt_of(request.prompt).decode()[:SHOWN]
    if request.kind != "messages":
        return str(request.prompt)[:SHOWN]
    return "\n".join(f"{message['role']}: {message['content']}" for message in request.shown)[:SHOWN]
