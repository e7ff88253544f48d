"""The slots of each route: how many requests it may have in flight, resizable. Pure: no clock, no loop.

A *route* is an address that takes requests: a replica, an engine in this process, or a gateway.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 0.5, 30.0
"""Cooldown of a route that refuses requests, in seconds: it doubles until the route answers again."""


@dataclass(slots=True)
class _RouteSlots:
    window: int
    in_flight: int = 0
    cools_until: float = 0.0
    cooldown_s: float = FIRST_COOLDOWN_S


class Slots:
    """At most `window` requests on each route; a smaller window cancels none, it waits for their ends."""

    def __init__(self, windows: Mapping[str, int]) -> None:
        """`windows` gives the slots of each route, 1 at least."""
        self._routes = {route: _RouteSlots(_checked(window)) for route, window in windows.items()}
        self._in_flight = 0

    @property
    def window(self) -> int:
        """Slots of all routes."""
        return sum(slots.window for slots in self._routes.values())

    @property
    def in_flight(self) -> int:
        """Requests in flight on all routes."""
        return self._in_flight

    @property
    def by_route(self) -> dict[str, int]:
        """Requests in flight on each route."""
        return {route: slots.in_flight for route, slots in self._routes.items()}

    def in_flight_on(self, route: str) -> int:
        """Return the number of requests in flight on a route."""
        return self._routes[route].in_flight

    def take(self, now: float, wants: Callable[[str], bool] = lambda _: True) -> str | None:
        """Take a slot on the route with the most free slots of those that want one; None if none is free.

        A route in its cooldown is left out, even where all routes are: then nothing is taken before the first
        cooldown ends.
        """
        best, most_free = None, 0
        for route, slots in self._routes.items():
            free = slots.window - slots.in_flight
            if free > most_free and slots.cools_until <= now and wants(route):
                best, most_free = route, free
        if best is not None:
            self._routes[best].in_flight += 1
            self._in_flight += 1
        return best

    def may_reuse(self, route: str, now: float) -> bool:
        """Tell whether the holder of a slot may use it for another request."""
        slots = self._routes[route]
        return slots.in_flight <= slots.window and slots.cools_until <= now

    def release(self, route: str) -> None:
        """Free a slot."""
        self._routes[route].in_flight -= 1
        self._in_flight -= 1

    def resize(self, route: str, window: int) -> None:
        """Change the number of slots of a route."""
        self._routes[route].window = _checked(window)

    def cool_down(self, route: str, now: float) -> float:
        """Start the cooldown of a route that refused a request; return the seconds that are left of it.

        Without it a route that refuses at once always has the most free slots and would draw all rows.
        Requests that fail together count once: a cooldown that has begun is not made longer. The only route
        there is has no cooldown: there each row has its own pause.
        """
        slots = self._routes[route]
        if len(self._routes) > 1 and slots.cools_until <= now:
            slots.cools_until = now + slots.cooldown_s
            slots.cooldown_s = min(slots.cooldown_s * 2, LONGEST_COOLDOWN_S)
        return max(0.0, slots.cools_until - now)

    def answered(self, route: str) -> None:
        """Record an answer of a route, which ends its cooldown."""
        slots = self._routes[route]
        slots.cools_until = 0.0
        slots.cooldown_s = FIRST_COOLDOWN_S


def _checked(window: int) -> int:
    if window < 1:
        raise ValueError(f"a route needs at least one slot (got {window})")
    return window
