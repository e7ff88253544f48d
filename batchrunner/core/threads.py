"""Pools of threads that a Ctrl-C does not wait for."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads and wait for their end, but not after a Ctrl-C: a mount may never answer."""
    pool = ThreadPoolExecutor(threads)
    waits = True
    try:
        yield pool
    except KeyboardInterrupt:
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)
