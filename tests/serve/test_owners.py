"""What an owner may do on a server with several owners."""

import asyncio
import json
from pathlib import Path

import pytest

from batchrunner.serve.api_errors import ApiError
from batchrunner.serve.owners import CALLS_A_SECOND, MOST_CALLS_AT_ONCE, Owners
from batchrunner.serve.server import _sweep_until
from batchrunner.serve.state import State
from tests.support.server_thread import PATIENCE_S


def owners_of(directory: Path) -> Owners:
    """Return two owners, of whom one is an admin."""
    keys = directory / "keys.yaml"
    keys.write_text("- {name: anna, key: sk-anna}\n- {name: root, key: sk-root, admin: true}\n")
    return Owners(keys, "", usage=directory / "usage.json")


def test_a_flood_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner has a number of calls at once and then so many a second; an admin has any number."""
    owners, now = owners_of(tmp_path), 100.0
    monkeypatch.setattr("batchrunner.serve.owners.time.monotonic", lambda: now)
    anna, root = owners.owner_of("sk-anna"), owners.owner_of("sk-root")
    assert anna is not None
    assert root is not None

    def allowed() -> int:
        for count in range(1000):
            try:
                owners.count_call(anna)
            except ApiError:
                return count
        return 1000

    assert allowed() == MOST_CALLS_AT_ONCE
    with pytest.raises(ApiError) as refused:
        owners.count_call(anna)
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (429, "1")
    now += 1
    assert allowed() == CALLS_A_SECOND
    for _ in range(1000):
        owners.count_call(root)


def test_tokens_are_those_of_this_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that were used outlive the server, and end with the day."""
    owners = owners_of(tmp_path)
    owners.account_of("anna").tokens = 70
    asyncio.run(owners.save_usage())
    again = owners_of(tmp_path)
    assert again.account_of("anna").tokens == 70
    monkeypatch.setattr("batchrunner.serve.owners._today", lambda: "2999-01-01")
    asyncio.run(again.save_usage())
    assert again.account_of("anna").tokens == 0
    assert json.loads((tmp_path / "usage.json").read_text())["day"] == "2999-01-01"
    assert owners_of(tmp_path).account_of("anna").tokens == 0


def test_a_new_day_begins_at_midnight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner who used all tokens of a day may create a batch in the first moment of the next day."""
    owners = owners_of(tmp_path)
    anna, account = owners.owner_of("sk-anna"), owners.account_of("anna")
    assert anna is not None
    account.most_tokens = account.tokens = 10
    with pytest.raises(ApiError, match="Too Many Requests"):
        owners.check_limits(anna, [])
    monkeypatch.setattr("batchrunner.serve.owners._today", lambda: "2999-01-01")
    owners.check_limits(anna, [])
    assert account.tokens == 0


async def test_batches_resume_at_midnight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server resets the used tokens when the day ends, not at its next sweep a minute later."""
    owners, stop_event, swept = owners_of(tmp_path), asyncio.Event(), asyncio.Event()
    account = owners.account_of("anna")
    account.most_tokens = account.tokens = 10
    sleeps = iter((0.0, PATIENCE_S))

    def midnight() -> float:
        """Return the time until midnight: it comes at once after the first sweep, and not again."""
        monkeypatch.setattr("batchrunner.serve.owners._today", lambda: "2999-01-01")
        sleep_s = next(sleeps)
        if sleep_s:
            swept.set()
        return sleep_s

    monkeypatch.setattr("batchrunner.serve.server.seconds_left_of_day", midnight)
    assert owners.account_of("anna").is_paused
    sweeping = asyncio.create_task(_sweep_until(stop_event, State(tmp_path / "state"), owners))
    await asyncio.wait_for(swept.wait(), PATIENCE_S)
    assert not owners.account_of("anna").is_paused
    stop_event.set()
    await sweeping


def test_the_limit_of_queued_requests(tmp_path: Path) -> None:
    """The call that creates a batch and the validation of its file decide by the same limit."""
    owners = owners_of(tmp_path)
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: anna, key: sk-anna, max_queued_requests: 5}\n")
    owners.read_again()
    anna = owners.owner_of("sk-anna")
    assert anna is not None
    batches = [{"request_counts": {"total": 6, "completed": 1, "failed": 1}}]
    owners.check_limits(anna, batches)
    assert owners.excess_of_queue("anna", batches, new=1) is None
    excess = owners.excess_of_queue("anna", batches, new=2)
    assert excess == "You have 4 queued requests, and 2 more exceed the limit: your limit is 5."
    with pytest.raises(ApiError):
        owners.check_limits(anna, [*batches, {"request_counts": {"total": 1, "completed": 0, "failed": 0}}])
