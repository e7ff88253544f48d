"""Under which name the model of a request is asked for: files name models that this engine does not know."""

import logging
from collections.abc import Collection

from batchrunner.core.types import RequestBody

log = logging.getLogger(__name__)


class ModelNames:
    """The names of an engine's model. Any other name in a request is replaced; the log says so once."""

    def __init__(self, names: Collection[str], any_model: str) -> None:
        """Take the model's own names, and the one that the engine takes for whatever model it serves."""
        self._names = frozenset(names)
        self._any_model = any_model
        self._told = False

    def sent(self, body: RequestBody) -> str | None:
        """Return the name that a request is sent with; None where it has none."""
        name = body.model
        if name is None or name in self._names:
            return name
        if any(name.startswith(f"{own}:") for own in self._names):  # with a LoRA adapter
            return name
        if not self._told:
            self._told = True
            served = ", ".join(sorted(self._names))
            log.warning(
                "the requests ask for the model %s: %s answers them, and the results keep the name",
                name,
                served,
            )
        return self._any_model
