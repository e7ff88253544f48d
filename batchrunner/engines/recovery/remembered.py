"""Arguments that worked after a death for want of memory, in a small file for the next run."""

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from batchrunner.core.errors import BatchrunError
from batchrunner.core.files import cache_directory
from batchrunner.output.files import write_json

log = logging.getLogger(__name__)

FORMAT = 1
REMEMBERED = {
    "chunked-prefill-size", "max-running-requests", "max-total-tokens", "mem-fraction-static",
    "cuda-graph-max-bs", "cuda-graph-max-bs-decode", "schedule-conservativeness",
}  # fmt: skip
"""Arguments that are read from a file if they are numbers; a file in a cache may hold anything."""
OFF: Mapping[str, Any] = {
    "cuda-graph-backend-decode": "disabled",
    "disable-cuda-graph": True,
    "cuda-graph-backend-prefill": "disabled",
    "disable-piecewise-cuda-graph": True,
}
"""The only other arguments that are read, with their only values: the last steps switch graphs off."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Arguments with which a server ran, after it had died with others."""

    args: dict[str, Any]
    """Arguments as `engine.args` has them."""
    why: str
    """Why the server died before."""
    on: str
    """Day on which they were learned, YYYY-MM-DD."""


class Remembered:
    """The file for one model, card and version of SGLang."""

    def __init__(self, model: str, card: str, version: str | None) -> None:
        self._about = {"model": model, "card": card, "sglang": version or "unknown"}
        digest = hashlib.sha256(orjson.dumps(self._about, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])[:60]
        self.path = cache_directory() / "engines" / f"{name}-{digest}.json"

    def recall(self) -> Lesson | None:
        """Return what was learned; None without a file, and with a warning where it cannot be read."""
        try:
            return self._read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as failure:
            log.warning("%s: not read (%s): delete it", self.path, failure)
            return None

    def keep(self, lesson: Lesson) -> None:
        """Write a lesson down for the next run; log a warning where that fails."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"format": FORMAT, **self._about, **asdict(lesson)})
        except (OSError, BatchrunError) as failure:
            log.warning("what worked is not remembered for the next run: %s", failure)

    def _read(self) -> Lesson | None:
        stored = orjson.loads(self.path.read_bytes())
        if stored["format"] != FORMAT or any(stored[name] != value for name, value in self._about.items()):
            raise ValueError("it is not of this version, or about another engine")
        args = {name: value for name, value in stored["args"].items() if name in REMEMBERED or name in OFF}
        if not all(_is_ours(name, value) for name, value in args.items()):
            raise TypeError("its args should be numbers, or switch graphs off")
        return Lesson(args, str(stored["why"])[:200], str(stored["on"])[:10]) if args else None


def _is_ours(name: str, value: Any) -> bool:
    """Tell whether healing can have set an argument to this value."""
    off = OFF.get(name)
    return type(value) in {int, float} if off is None else type(value) is type(off) and value == off
