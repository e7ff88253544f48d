"""What happened to the engine's servers: deaths, hangs, healing."""

from typing import Any

from batchrunner.engines.base import Engine
from batchrunner.output.events import EventLog

REPORTED = frozenset({"recalled", "died", "hangs", "healed", "lost"})
"""Kinds of incidents that report.json lists; changes of a gateway's workers are in the event log only."""


class IncidentLog:
    """Writes the engine's incidents to the event log, and keeps those for report.json."""

    def __init__(self, engine: Engine, events: EventLog) -> None:
        self._engine = engine
        self._events = events
        self.reported: list[dict[str, Any]] = []

    def update(self) -> None:
        """Write what happened since the last call."""
        for incident in self._engine.incidents():
            values = {"who": incident.who, "why": incident.why, **incident.facts}
            self._events.write(f"engine_{incident.what}", **values)
            if incident.what in REPORTED:
                self.reported.append({"what": incident.what, **values})
