"""The machine to tune on: the flags of the installed SGLang, the device and its memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchrunner.advise.roofline import UnknownLimitError, model_of_config
from batchrunner.engines.device import cards, gpus, on_cpu
from batchrunner.engines.flags import Flags, installed
from batchrunner.engines.logs.facts import Architecture, architecture_of
from batchrunner.engines.model_files import read_config
from batchrunner.engines.recovery.host import free_bytes
from batchrunner.job.engine import ServerEngine
from batchrunner.job.spec import Job

POOL_SHARE = 4
"""A CPU's KV pool may take one part in this many of the free memory: others use the machine too."""
FLOAT32_BYTES = 4
"""Bytes of a number in a CPU's KV pool (`engines.device`)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a search may change, and what it has to know of the device."""

    flags: Flags
    cpu: bool = True
    cards: int = 0
    card: str | None = None
    """Name of the GPU, as `nvidia-smi` prints it."""
    card_gb: float = 0.0
    most_pool_tokens: int = 0
    """Tokens of the largest KV pool that a CPU's memory allows; 0 where that is not known."""
    ignores_eos: bool = False
    """Whether the job's outputs have exactly `max_new_tokens`."""
    allowed: frozenset[str] = frozenset()
    """What the user allowed of `ALLOWABLE` (space.py)."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config.json; empty where it is not on this machine."""
    one_of_several: bool = False
    """Whether the server is one replica of a gateway, which decides how many there are."""

    @property
    def architecture(self) -> Architecture | None:
        """The GPU's generation; None where its name is not known."""
        return architecture_of(self.card or "")


def machine_for(job: Job, engine: ServerEngine, allowed: Iterable[str], *, one_of_several: bool) -> Machine:
    """Describe this machine; asks the installed SGLang for its flags, which takes about 6 s."""
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
        config=read_config(engine.model, engine.args.get("revision")),
        one_of_several=one_of_several,
    )


def _pool_tokens(engine: ServerEngine) -> int:
    """Return how many tokens a quarter of the free memory holds; 0 where model or memory are not known."""
    try:
        config = read_config(engine.model, engine.args.get("revision"))
        token_bytes = model_of_config(config).kv_bytes(FLOAT32_BYTES)
    except UnknownLimitError:
        return 0
    return int((free_bytes() or 0) / POOL_SHARE / token_bytes)
