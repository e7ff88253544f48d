"""The bytes of an answer in pieces → its events (server-sent events with their data in one line). Pure."""

from batchrunner.core.errors import BundleRefusedError

_DATA = b"data:"


class EventLines:
    """Cuts an answer into events, wherever its pieces begin and end."""

    def __init__(self, most_bytes: int) -> None:
        """No event may have more than `most_bytes`."""
        self._most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Take the next piece; return the data of the events that it completes. Other lines are left out.

        Raises BundleRefusedError for an event that is too large.
        """
        *lines, rest = part.split(b"\n")
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._most_bytes:
            raise BundleRefusedError(f"an event is larger than {self._most_bytes >> 20} MiB")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
