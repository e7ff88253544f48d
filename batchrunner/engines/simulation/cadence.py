"""`--prefill-decode-interval`: how many decode passes follow a prefill pass before the next one."""


class PrefillCadence:
    """Counts the decode passes that are still owed; `_should_defer_prefill` in `managers/scheduler.py`."""

    def __init__(self, interval: int, least_samples: int) -> None:
        """`interval` passes are owed after each prefill; below `least_samples` running ones, none."""
        self._interval = interval
        self._least_samples = least_samples
        self.decodes_left = 0
        """Decode passes that are still owed."""

    def defers_prefill(self, running: int) -> bool:
        """Tell whether the next pass decodes whoever waits, and count it.

        With nothing to decode the server's loop turns without a pass until none is owed.
        """
        if not self.decodes_left:
            return False
        if running < max(self._least_samples, 1):
            self.decodes_left = 0
            return False
        self.decodes_left -= 1
        return True

    def decoded(self, passes: int) -> None:
        """Count decode passes beyond the one that `defers_prefill` counted."""
        self.decodes_left = max(self.decodes_left - passes, 0)

    def begin(self) -> None:
        """Owe the decode passes that follow a prefill."""
        self.decodes_left = self._interval
