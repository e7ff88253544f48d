"""Pools of threads that a Ctrl-C does not wait for."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads and wait for their end, but not after a Ctrl-C: a mount may never answer."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
