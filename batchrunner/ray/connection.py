"""The connection of a command to a Ray cluster, which is tried before Ray itself tries for minutes."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from batchrunner.core.errors import JobError
from batchrunner.core.timing import TIMING

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address that stands for a new cluster of this machine alone."""
_MODE = "RAY_AUTH_MODE"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first, with empty settings (RFC 9113, section 3.4)."""
_HEAD, _SETTINGS = 9, 4
"""Bytes of a frame's head, whose fourth is its type, and the type that the server's first frame has."""


@contextlib.contextmanager
def connected(address: str | None, *, log_to_driver: bool) -> Iterator[None]:
    """Connect this process to a cluster; raises JobError where there is none.

    Without an address it is that of RAY_ADDRESS, which a job of `ray job submit` has, or of a cluster on this
    machine. `log_to_driver` shows what the cluster's processes log.
    """
    found = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in found:
        raise JobError(
            f"--address {found}: a Ray client cannot start a job",
            hint="give host:port of the head node, or submit the command with `ray job submit`",
        )
    if found not in {LOCAL, "auto"}:
        _try(found)
    place = (_without_token() if found == "auto" else None) or found
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    try:
        ray.init(address=place, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ValueError, OSError) as failure:
        said = " ".join(str(failure).split())[:300]
        if "Failed to connect" in said:  # it is there, but refuses this process
            raise JobError(
                f"--address {found}: Ray cannot connect: {said}",
                hint="if the cluster wants a token, Ray's default, export RAY_AUTH_MODE=token here too",
            ) from None
        if found == "auto" and isinstance(failure, ConnectionError):
            raise JobError(
                "no Ray cluster runs on this machine",
                hint="give --address host:port, or start one: `ray start --head` or --address local",
            ) from None
        raise JobError(f"--address {found}: Ray cannot connect: {said}") from None
    try:
        yield
    finally:
        ray.shutdown()


class HeadNode:
    """The head node of the cluster, without which Ray ends this process after a minute."""

    def __init__(self, address: str) -> None:
        """`address` is its host:port."""
        self._address = address
        self._was_there = True

    def look(self) -> None:
        """Say once that it does not answer any more."""
        is_there = _is_there(self._address)
        if self._was_there and not is_there:
            log.warning(
                "the head node of the Ray cluster, %s, does not answer: Ray ends this command if it stays "
                "away; run the same command again once it is back: it resumes",
                self._address,
            )
        self._was_there = is_there


def _is_there(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), TIMING.ray_answer).close()
    except (OSError, OverflowError):
        return False
    return True


def _without_token() -> str | None:
    """Return the address of the cluster on this machine where it wants no token, although there is one here.

    For a cluster that it finds by itself, Ray would take the token of this machine (~/.ray/auth_token), and
    then refuse what the cluster asks without it: every worker would be ended as it starts. None leaves the
    choice to Ray.
    """
    tokens = AuthenticationTokenLoader.instance()
    if _MODE in os.environ or not tokens.has_token(ignore_auth_mode=True):
        return None
    tokens.reset_cache()  # a token that was looked at is wanted from whoever asks this process, in any mode
    with contextlib.suppress(RayError, RuntimeError, ValueError, OSError), _no_lines_of_ray():
        address = canonicalize_bootstrap_address_or_die("auto")
        GcsClient(address=address)  # asks for the name of the cluster
        return str(address)
    return None


@contextlib.contextmanager
def _no_lines_of_ray() -> Iterator[None]:
    """Drop what Ray's own code writes to standard error when it is refused."""
    sys.stderr.flush()
    kept = os.dup(2)
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _try(address: str) -> None:
    """Raise JobError where no server of gRPC, as which a head node answers, is at `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise JobError(f"--address {address}", hint="write it as host:port, such as 10.0.0.1:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMING.ray_answer) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_PREFACE)
            head = connection.recv(_HEAD, socket.MSG_WAITALL)
    except (OSError, OverflowError) as failure:
        raise JobError(
            f"--address {address}: no Ray cluster answers there ({failure or 'no answer'})",
            hint="give the address that `ray start --head` printed",
            mark=";",
        ) from None
    if len(head) < _HEAD or head[3] != _SETTINGS:
        raise JobError(
            f"--address {address}: what answers there is no Ray cluster",
            hint="give the port of the head node that `ray start --head` printed, 6379 by default",
            mark=";",
        )
