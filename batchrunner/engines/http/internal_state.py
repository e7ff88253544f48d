"""Changes a running server's `schedule_conservativeness`, where its version can do that.

SGLang 0.5.23 knows `POST /set_internal_state`, but takes no `schedule_conservativeness` there: it answers
`{"updated": false}` and stays as it is. Older versions have no such path.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from batchrunner.core.timing import TIMING

PATH = "/set_internal_state"


async def set_conservativeness(url: str, key: str | None, value: float) -> bool:
    """Ask a server to schedule with this conservativeness from now on; return whether it does.

    A server that refuses, does not know the path, or cannot be reached, raises nothing.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"server_args": {"schedule_conservativeness": value}}
    timeout = aiohttp.ClientTimeout(total=TIMING.status_timeout)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(url + PATH, json=body) as reply,
        ):
            return reply.status == HTTPStatus.OK and _is_updated(orjson.loads(await reply.read()))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return False


def _is_updated(reply: Any) -> bool:
    """Tell whether a server says so, each of its schedulers if they answer one by one."""
    if isinstance(reply, list):
        return bool(reply) and all(map(_is_updated, reply))
    return isinstance(reply, Mapping) and reply.get("updated") is True
