"""Bad flags of the prefix cache and of the KV pool's pages are found in logs of the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.advice import said_of


@pytest.mark.parametrize(
    ("rule", "log", "client", "change"),
    [
        ("cache-off", "radix_off", {"possible_share": 0.8}, {"disable-radix-cache": None}),
        ("order-of-server", "policy_random", {"possible_share": 0.9}, {"schedule-policy": "fcfs"}),
        (
            "pages-large", "page_size", {"ignore_eos": True, "outputs": 600, "output_tokens": 24_000},
            {"page-size": 1},
        ),
    ],
)  # fmt: skip
def test_the_flag_is_named_first(rule: str, log: str, client: dict[str, Any], change: dict[str, Any]) -> None:
    """The change is of that flag alone, and comes before all others."""
    first = said_of(log, **client)[0]
    assert (first.rule, first.args) == (rule, change)


@pytest.mark.parametrize(
    ("log", "client", "flag"),
    [
        ("radix_off", {"possible_share": 0.05}, "disable-radix-cache"),
        ("radix_off", {}, "disable-radix-cache"),
        ("policy_random", {"possible_share": 0.7}, "schedule-policy"),
        ("policy_random", {}, "schedule-policy"),
        ("page_size", {"ignore_eos": True, "outputs": 600, "output_tokens": 600_000}, "page-size"),
        ("page_size", {"outputs": 600, "output_tokens": 24_000}, "page-size"),
    ],
)
def test_it_is_not_named_where_it_does_not_matter(log: str, client: dict[str, Any], flag: str) -> None:
    """Nothing is shared, or not known to be; the cache has nearly all; outputs are long beside a page."""
    assert flag not in {name for advice in said_of(log, **client) for name in advice.args}
