"""The in-flight windows: how many requests each route may have open, resizable, without a clock or a loop.

A *route* is an address that takes requests: a replica, an engine in this process, or a gateway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
"""A route that takes nothing is left alone for so long, doubling each time until it answers again."""


@dataclass(slots=True)
class _Place:
    window: int
    in_flight: int = 0
    rests_until: float = 0.0
    rest_s: float = FIRST_REST_S


class Slots:
    """At most `window` requests on each route; a smaller window takes nothing back, it waits."""

    def __init__(self, windows: Mapping[str, int]) -> None:
        self._places = {route: _Place(_checked(window)) for route, window in windows.items()}
        self._in_flight = 0

    @property
    def window(self) -> int:
        """How many may be in flight, over all routes."""
        return sum(place.window for place in self._places.values())

    @property
    def in_flight(self) -> int:
        """How many are, over all routes."""
        return self._in_flight

    @property
    def by_route(self) -> dict[str, int]:
        """How many are in flight on each route."""
        return {route: place.in_flight for route, place in self._places.items()}

    def on(self, route: str) -> int:
        """Return how many are in flight on a route."""
        return self._places[route].in_flight

    def take(self, now: float, wants: Callable[[str], bool] = lambda _: True) -> str | None:
        """Take a place on the route with the most room, of those that want one; None where there is no room.

        A route that rests is left out, unless all of them do: then nothing is taken before the first wakes.
        """
        best, most_room = None, 0
        for route, place in self._places.items():
            room = place.window - place.in_flight
            if room > most_room and place.rests_until <= now and wants(route):
                best, most_room = route, room
        if best is not None:
            self._places[best].in_flight += 1
            self._in_flight += 1
        return best

    def keeps(self, route: str, now: float) -> bool:
        """Tell whether the holder of a place may go on to use it for another request."""
        place = self._places[route]
        return place.in_flight <= place.window and place.rests_until <= now

    def release(self, route: str) -> None:
        """Give a place back."""
        self._places[route].in_flight -= 1
        self._in_flight -= 1

    def resize(self, route: str, window: int) -> None:
        """Change the window of a route."""
        self._places[route].window = _checked(window)

    def rest(self, route: str, now: float) -> float:
        """Leave a route alone, where there is another, for a while that doubles; return its seconds.

        Without this a route that refuses at once, and so always has the most room, would draw all rows.
        Rows in flight that fail together are one failure: a route that rests already goes on as it does.
        A route of its own does not rest: its rows do, each with its own pause.
        """
        place = self._places[route]
        if len(self._places) > 1 and place.rests_until <= now:
            place.rests_until = now + place.rest_s
            place.rest_s = min(place.rest_s * 2, LONGEST_REST_S)
        return max(0.0, place.rests_until - now)

    def answered(self, route: str) -> None:
        """Take note that a route works."""
        place = self._places[route]
        place.rests_until = 0.0
        place.rest_s = FIRST_REST_S


def _checked(window: int) -> int:
    if window < 1:
        raise ValueError(f"a window holds at least one request (got {window})")
    return window
