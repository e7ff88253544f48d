"""The order of a job's rows: as the job says, or with `order: auto` decided from a sample of its prompts."""

import time
from collections.abc import Callable, Hashable

from pyroaring import BitMap64

from batchrunner.core.types import Outcome
from batchrunner.input.job_input import JobInput
from batchrunner.input.order import OrderDecision, decide, stretches
from batchrunner.input.prompt_bytes import RequestDigests, is_repeatable, prompt_bytes

SAMPLE_S = 60.0
"""Seconds after which the sample ends, because templates may take long to render."""
STRETCH_BYTES = 16 << 20
"""A stretch ends once its prompts have at least this number of bytes."""


def decide_order(
    job_input: JobInput, rows: BitMap64, check_stop: Callable[[], None] = lambda: None
) -> OrderDecision:
    """Return the order in which to send these rows. Raises InputError.

    `check_stop` is called before each row of the sample, and may raise to end it.
    """
    order = job_input.job.order
    if order != "auto":
        return OrderDecision(order, "set by the job")

    ends_at = time.monotonic() + SAMPLE_S
    prompts, keys = [], []
    for stretch in stretches(rows, job_input.dataset.row_group_ends()):
        some_prompts, some_keys = _read_stretch(job_input, stretch, ends_at, check_stop)
        prompts.append(some_prompts)
        keys.append(some_keys)
    return decide(prompts, len(rows), keys if job_input.dedupes else None)


def _read_stretch(
    job_input: JobInput, rows: BitMap64, ends_at: float, check_stop: Callable[[], None]
) -> tuple[list[bytes], list[Hashable]]:
    """Return the prompt of each row, and a key that is equal for rows that share an answer.

    A row that cannot be rendered has an empty prompt. The remaining rows are left out once the prompts have
    STRETCH_BYTES, or once the time is after `ends_at`.
    """
    prompts: list[bytes] = []
    keys: list[Hashable] = []
    digests = RequestDigests()
    size = 0
    for batch in job_input.batches(rows, check_stop):
        for item in batch:
            prompt = b""
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
