"""What an owner may do on a server with several owners."""

import json
from pathlib import Path

import pytest

from batchrunner.serve.api_errors import ApiError
from batchrunner.serve.owners import CALLS_A_SECOND, MOST_CALLS_AT_ONCE, Owners


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

    assert allowed() == MOST_CALLS_AT_ONCE + 1
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
    owners.save_usage()
    again = owners_of(tmp_path)
    assert again.account_of("anna").tokens == 70
    monkeypatch.setattr("batchrunner.serve.owners._today", lambda: "2999-01-01")
    again.save_usage()
    assert again.account_of("anna").tokens == 0
    assert json.loads((tmp_path / "usage.json").read_text())["day"] == "2999-01-01"
    assert owners_of(tmp_path).account_of("anna").tokens == 0
