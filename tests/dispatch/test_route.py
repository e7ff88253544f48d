"""Windows, cooldowns and suspensions of routes."""

from hypothesis import given
from hypothesis import strategies as st

from batchrunner.dispatch.route import LONGEST_COOLDOWN_S, LONGEST_SUSPENSION_S, Routes

URLS = ("a", "b", "c")
events = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "resize", "fail", "answer", "wait"]),
        st.sampled_from(URLS),
        st.integers(1, 6),
    ),
    max_size=60,
)


def routes(**windows: int) -> Routes:
    made = Routes()
    for url, window in windows.items():
        made.open(url).window = window
    return made


def test_a_server_that_failed_is_the_last_choice() -> None:
    """After its pause it gets a request if no other server has a free slot, until it answers again."""
    servers = routes(a=5, b=1)
    cooldown_s = servers.cool_down(servers["a"], 0.0)
    order = [servers.acquire_slot(cooldown_s) for _ in range(2)]
    assert order == [servers["b"], servers["a"]]
    servers["a"].end_cooldown()
    servers.release_slot(servers["b"])
    assert servers.acquire_slot(cooldown_s) is servers["a"]


@given(windows=st.tuples(*[st.integers(1, 6)] * 3), history=events)
def test_no_window_is_ever_exceeded(
    windows: tuple[int, int, int], history: list[tuple[str, str, int]]
) -> None:
    """Whatever happens, a slot is given where one is free on a route without a cooldown, and only there."""
    size, in_flight = dict(zip(URLS, windows, strict=True)), dict.fromkeys(URLS, 0)
    servers, now = routes(**size), 0.0
    cool_until = dict.fromkeys(URLS, 0.0)
    for event, url, number in history:
        route = servers[url]
        if event == "acquire":
            free = {name for name in URLS if in_flight[name] < size[name] and cool_until[name] <= now}
            acquired = servers.acquire_slot(now)
            assert (acquired is not None and acquired.url in free) if free else acquired is None
            if acquired is not None:
                in_flight[acquired.url] += 1
        elif event == "release" and in_flight[url]:
            in_flight[url] -= 1
            servers.release_slot(route)
        elif event == "resize":
            size[url] = route.window = number
        elif event == "fail":
            cool_until[url] = now + servers.cool_down(route, now)
        elif event == "answer":
            cool_until[url] = 0.0
            route.end_cooldown()
        else:
            now += number
        assert {route.url: route.in_flight for route in servers} == in_flight
        assert (servers.in_flight, servers.window) == (sum(in_flight.values()), sum(size.values()))
        for name in URLS:
            has_slot = in_flight[name] <= size[name] and cool_until[name] <= now
            assert servers[name].has_slot(now) == has_slot


def test_a_cooldown_doubles_until_there_is_an_answer() -> None:
    """A route that stays down is tried less and less often, at most twice a minute; an answer ends that.

    A hundred rows that lose it at once are one failure; the only route has no cooldown.
    """
    servers, now, cooldowns = routes(a=4, full=1), 0.0, []
    a, full = servers
    while full.in_flight == 0:
        servers.acquire_slot(now)
    a.window = 9
    for _ in range(9):
        cooldowns.append(servers.cool_down(a, now))
        assert servers.cool_down(a, now) == cooldowns[-1]
        assert servers.acquire_slot(now) is None
        now += cooldowns[-1]
        assert servers.acquire_slot(now) is a
        servers.release_slot(a)
    assert cooldowns[:4] == [0.5, 1.0, 2.0, 4.0]
    assert cooldowns[-1] == LONGEST_COOLDOWN_S
    a.end_cooldown()
    assert servers.cool_down(a, now) == 0.5
    only = routes(a=2)
    assert only.cool_down(only["a"], 0.0) == 0.0


def test_a_suspension_doubles_until_there_is_an_answer() -> None:
    """A route that fails what others answer gets rows again after half a minute, and later after ten."""
    servers, now, suspensions = routes(a=4, b=4), 0.0, []
    a, b = servers
    for _ in range(7):
        suspensions.append(a.suspend(now) or 0.0)
        assert a.suspend(now) is None  # it is suspended already
        assert servers.acquire_slot(now, wants=lambda route: route is a) is None
        assert not servers.has_others({b})
        assert servers.may_get(b, {b})
        now += suspensions[-1] + 1
    assert suspensions[:3] == [30.0, 60.0, 120.0]
    assert suspensions[-1] == LONGEST_SUSPENSION_S
    assert not servers.has_others({b})  # also while it is tried
    a.end_cooldown()
    assert servers.has_others({b})
    assert a.suspend(now) == 30.0
