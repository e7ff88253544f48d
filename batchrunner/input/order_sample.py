"""Decides the order of a job's rows; with `order: auto`, from a sample of the prompts."""

import time
from collections.abc import Callable, Hashable

from pyroaring import BitMap64

from batchrunner.core.types import Outcome
from batchrunner.input.job_input import JobInput
from batchrunner.input.order import OrderDecision, decide, stretches
from batchrunner.input.prompt_bytes import RequestDigests, is_repeatable, prompt_bytes

SAMPLE_S = 60.0
"""Maximum time in seconds for reading the sample, because templates may take long to render."""
STRETCH_BYTES = 16 << 20
"""Size of the prompts, in bytes, at which a stretch (consecutive rows of the sample) ends early."""


def decide_order(
    job_input: JobInput, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
) -> OrderDecision:
    """Return the order in which to send `rows`. Raises InputError if a file cannot be read.

    `check_stop` is called before each row of the sample, and may raise an exception to stop.
    """
    order = job_input.job.order
    if order != "auto":
        return OrderDecision(order, "set by the job")

    ends_at = time.monotonic() + SAMPLE_S
    prompts, keys = [], []
    for stretch in stretches(rows, job_input.dataset.row_group_ends()):
        stretch_prompts, stretch_keys = _read_stretch(job_input, stretch, ends_at, check_stop)
        prompts.append(stretch_prompts)
        keys.append(stretch_keys)
    return decide(prompts, len(rows), keys if job_input.dedupes else None)


def _read_stretch(
    job_input: JobInput, rows: BitMap64, ends_at: float, check_stop: Callable[[], None]
) -> tuple[list[bytes], list[Hashable]]:
    """Render rows; return their prompts, and keys that are equal if the rows may share one answer.

    A row that cannot be rendered has an empty prompt. Reading ends early once the prompts have STRETCH_BYTES
    in all, or at the time `ends_at` of the monotonic clock.
    """
    prompts: list[bytes] = []
    keys: list[Hashable] = []
    digests = RequestDigests()
    size = 0
    for batch in job_input.batches(rows, check_stop):
        for item in batch:
            prompt = b""
            # The row number is unique, so by default a row shares no answer.
            key: Hashable = item.ref.row
            if not isinstance(item, Outcome):
                prompt = prompt_bytes(item)
                key = digests.of(item, prompt) if is_repeatable(item) else key
            prompts.append(prompt)
            keys.append(key)
            size += len(prompt)
        if size >= STRETCH_BYTES or time.monotonic() > ends_at:
            break
    return prompts, keys
