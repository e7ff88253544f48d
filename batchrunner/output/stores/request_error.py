"""The error of a request to a store, of which a read or a write is made."""


class StoreRequestError(OSError):
    """A request to a store failed; its text says why in a few words."""

    def __str__(self) -> str:
        """Return the reason alone."""
        return str(self.strerror)
