"""The samples that wait for their prefill, in the order of SGLang's schedule policy."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice

from batchrunner.simulation.radix import RadixCache
from batchrunner.simulation.sample import SimulatedRequest

MATCHED_AT_MOST = 128
"""`WAITING_QUEUE_PREFIX_MATCH_MAX`: a longer queue is served first come, first served under `lpm` too."""
REFRESH_PASSES = 32
"""`WAITING_PREFIX_REFRESH_INTERVAL`: admission passes between two refreshes of waiting prefixes."""
SHORT_MATCH_TOKENS = 32
"""`IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD` and `…_DEPRIORITIZE_THRESHOLD`, which are the same."""


class WaitingQueue:
    """The samples that wait; a dropped sample stays in the list and is skipped at the head."""

    def __init__(self) -> None:
        self._samples: deque[SimulatedRequest] = deque()
        self._length = 0
        self._refreshes = 0

    def __len__(self) -> int:
        return self._length

    def append(self, sample: SimulatedRequest) -> None:
        """Put a sample at the end: a new one, or one that was retracted with its outputs."""
        own_tokens = sample.fill_tokens - sample.prefix_tokens
        sample.path = (*sample.prefix, (sample, own_tokens))
        sample.state = "waiting"
        self._samples.append(sample)
        self._length += 1

    def drop(self, sample: SimulatedRequest) -> None:
        """Abort a sample that waits."""
        sample.state = "dropped"
        self._length -= 1
        if not self._length:
            self._samples.clear()

    def head(self) -> SimulatedRequest:
        """Return the first sample that waits."""
        while self._samples[0].state != "waiting":
            self._samples.popleft()
        return self._samples[0]

    def pop(self) -> SimulatedRequest:
        """Take the sample that `head` returned."""
        self._length -= 1
        return self._samples.popleft()

    def sort_by_prefix(self, cache: RadixCache) -> None:
        """Put the longest cached prefix first, and last the samples whose prefix another one will compute."""
        others = RadixCache()
        ranked = []
        for sample in self._waiting():
            matched = cache.match(sample.path, sample.fill_tokens)[1]
            rank = float(-min(matched, sample.fill_tokens - 1))
            if matched <= SHORT_MATCH_TOKENS and sample.prefix:
                if others.match(sample.path, sample.fill_tokens)[1] >= SHORT_MATCH_TOKENS:
                    rank = math.inf
                else:
                    others.insert(sample.path, sample.fill_tokens)
            ranked.append((rank, sample))
        ranked.sort(key=lambda pair: pair[0])
        self._samples = deque(sample for _, sample in ranked)

    def refresh(self, cache: RadixCache) -> None:
        """Touch the cached prefixes of the first samples, every REFRESH_PASSES calls."""
        if self._refreshes % REFRESH_PASSES == 0:
            first = list(islice(self._waiting(), MATCHED_AT_MOST))
            for sample in reversed(first):  # the head is touched last, so it is the most recent
                cache.match(sample.path, sample.fill_tokens)
        self._refreshes += 1

    def _waiting(self) -> Iterator[SimulatedRequest]:
        return (sample for sample in self._samples if sample.state == "waiting")
