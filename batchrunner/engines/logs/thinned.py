"""A list of bounded length that stands for a series of any length. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class Thinned(Generic[Item]):
    """The items of a series, evenly thinned out, oldest first: at most `most` of them.

    When there are more, every second one is dropped.
    """

    most: int
    every: int = 1
    """One of so many items is kept."""
    counted: int = 0
    """Number of all items."""
    _kept: list[Item] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Count an item."""
        if self.counted % self.every == 0:
            self._kept.append(item)
            if len(self._kept) > self.most:
                self._kept = self._kept[::2]
                self.every *= 2
        self.counted += 1

    def __len__(self) -> int:
        """Return the number of items that are kept."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items that are kept."""
        return iter(self._kept)
