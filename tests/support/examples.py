"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

EXAMPLES = 50
"""Number for a property whose examples take no time; `make torture` tries 20 times as many of each."""


def examples(count: int) -> settings:
    """Return the settings for a property that is tried with so many examples."""
    default = settings.default
    assert default
    return settings(max_examples=count * default.max_examples // EXAMPLES)
