"""Mooncake's transfer engine on one machine: a worker sends bytes by TCP, and its peer writes them.

SGLang's own code does everything else: the bootstrap of each request, the allocation of memory in the decode
worker, the choice of what to send, and the notice of the end.
"""

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Sequence

from sglang.srt.disaggregation.mooncake import MooncakeKVSender

_WRITE = struct.Struct("<QQ")
"""Header of bytes to write: their address in the memory of the peer, and their number, which is 0 at the end
of a message."""
_DONE = b"\1"
"""Answer of the peer, after it has written a message."""
CONNECT_S = 30.0

# The sender copies the indices of pages to pinned memory, for which torch needs the driver of a GPU. This
# turns that off.
MooncakeKVSender.supports_host_tensor_indices = False


class TransferEngine:
    """The methods of Mooncake's engine that SGLang calls. Each returns 0, or -1 after a failure."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        """Accepts the connections of peers; None before `initialize`."""
        self._thread = threading.local()
        """Has the connections of each thread to its peers, by their addresses."""

    def initialize(self, hostname: str, _metadata: str, _protocol: str, _device: str) -> int:
        self._listener = socket.create_server((hostname, 0))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def batch_register_memory(self, _addresses: Sequence[int], _lengths: Sequence[int]) -> int:
        return 0

    def batch_unregister_memory(self, _addresses: Sequence[int]) -> int:
        return 0

    def transfer_sync_write(self, peer: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(peer, [source], [target], [length])

    def batch_transfer_sync_write(
        self, peer: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        message = bytearray()
        for source, target, length in zip(sources, targets, lengths, strict=True):
            message += _WRITE.pack(target, length) + ctypes.string_at(source, length)
        try:
            connection = self._connection_to(peer)
            connection.sendall(message + _WRITE.pack(0, 0))
            _receive(connection, len(_DONE))
        except (OSError, EOFError):
            self._thread.__dict__.pop(peer, None)
            return -1
        return 0

    def send_probe(self, peer: str) -> int:
        try:
            self._connection_to(peer)
        except OSError:
            return -1
        return 0

    def _connection_to(self, peer: str) -> socket.socket:
        connections: dict[str, socket.socket] = self._thread.__dict__
        if peer not in connections:
            host, _, port = peer.rpartition(":")
            connections[peer] = socket.create_connection((host, int(port)), CONNECT_S)
        return connections[peer]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_write_messages, args=(connection,), daemon=True).start()


def _write_messages(connection: socket.socket) -> None:
    """Write the bytes of all messages of a peer to this process's memory, until the peer goes away."""
    with contextlib.suppress(OSError, EOFError), connection:
        while True:
            target, length = _WRITE.unpack(_receive(connection, _WRITE.size))
            if length:
                ctypes.memmove(target, _receive(connection, length), length)
            else:
                connection.sendall(_DONE)


def _receive(connection: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
