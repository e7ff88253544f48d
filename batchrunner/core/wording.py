"""Counts in words: `1 row`, `2 rows`."""


def counted(number: int, noun: str, spec: str = "") -> str:
    """Return a number with its noun, which gets an s unless the number is 1; `spec` is for `format`."""
    return f"{number:{spec}} {noun}{'' if number == 1 else 's'}"
