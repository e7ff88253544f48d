"""How many rows went in how many requests."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class BundleTotals:
    """Counts of this attempt, retries included."""

    requests: int = 0
    """Requests, those with one row included."""
    rows: int = 0
    """Rows in them."""
    bundles: int = 0
    """Requests with several rows."""
    most_rows: int = 0
    """Most rows of a request."""
    resent: int = 0
    """Rows that were sent again because the engine refused their bundle, or did not answer them in it."""

    def add(self, rows: int) -> None:
        """Count a request with so many rows."""
        self.requests += 1
        self.rows += rows
        self.bundles += rows > 1
        self.most_rows = max(self.most_rows, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json's `bundles`."""
        mean = round(self.rows / self.requests, 2) if self.requests else None
        return {
            "requests": self.requests,
            "rows_per_request": mean,
            "bundles": self.bundles,
            "most_rows": self.most_rows,
            "rows_resent": self.resent,
        }
