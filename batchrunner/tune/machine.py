"""What there is to tune on: the installed version's flags, the device, its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchrunner.advise.roofline import UnknownLimitError, model_of_config
from batchrunner.engines.device import cards, gpus, on_cpu
from batchrunner.engines.flags import installed
from batchrunner.engines.model_files import read_config
from batchrunner.engines.recovery.host import free_bytes
from batchrunner.tune.space import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchrunner.job.spec import Job, ServerEngine

POOL_SHARE = 4
"""Of the memory that is free, a CPU's KV pool may take one part in so many: others use the machine too."""
FLOAT32_BYTES = 4
"""A CPU's KV pool has it (`engines.device`)."""


def machine_for(job: Job, engine: ServerEngine, allowed: Iterable[str], *, one_of_several: bool) -> Machine:
    """Look at the machine; asks the installed SGLang for its flags, which takes some 6 s."""
    cpu = on_cpu(engine.device)
    card = None if cpu else next(iter(cards()), None)
    return Machine(
        flags=installed(engine.python, engine.env),
        cpu=cpu,
        cards=0 if cpu else len(gpus(engine.env)),
        card=card.name if card else None,
        card_gb=card.memory_bytes / (1 << 30) if card else 0.0,
        most_pool_tokens=_pool_tokens(engine) if cpu else 0,
        ignores_eos=job.sampling.ignore_eos is True,
        allowed=frozenset(allowed),
        one_of_several=one_of_several,
    )


def _pool_tokens(engine: ServerEngine) -> int:
    """Return how many tokens a quarter of the free memory holds; 0 where model or memory do not tell."""
    try:
        config = read_config(engine.model, engine.args.get("revision"))
        token_bytes = model_of_config(config).kv_bytes(FLOAT32_BYTES)
    except UnknownLimitError:
        return 0
    return int((free_bytes() or 0) / POOL_SHARE / token_bytes)
