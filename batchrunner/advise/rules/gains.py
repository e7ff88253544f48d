"""How much a change would gain: throughput with it over throughput without, by the log's pass times. Pure.

They assume that requests wait all the time, and that nothing but what is said changes.
"""

import math

from batchrunner.engines.logs.pass_times import PassTimes

WORTH = 1.05
"""Least gain for which a change is advised, where it can be estimated."""
LEAST_INTERVAL = 2
"""Fewest decode steps between prefill passes that are worth a flag."""


def more_running(times: PassTimes | None, now: float, then: float) -> float | None:
    """Return the gain of `then` instead of `now` running requests: fewer decode steps for the same tokens."""
    if times is None or not times.step_known or not 0 < now < then:
        return None
    return _gain(times, times.step_s * times.total.steps * (1 - now / then))


def larger_chunk(times: PassTimes | None, factor: float) -> float | None:
    """Return the gain of a chunk that is larger by a factor: fewer full passes for the same tokens."""
    if times is None or not times.total.passes or not (times.pass_known or times.step_known):
        return None
    return _gain(times, times.fixed_s * times.total.filled * (1 - 1 / factor))


def fewer_tokens(times: PassTimes | None, share: float) -> float | None:
    """Return the gain of computing fewer prompt tokens by a share, and of as many fewer full passes."""
    if times is None:
        return None
    return _gain(
        times, share * (times.new_token_s * times.total.new_tokens + times.pass_s * times.total.filled)
    )


def mixed(counts: PassTimes) -> float:
    """Return the gain of prefill passes that decode as well, each instead of a decode step.

    It holds where both take about as long, as they do while reading the weights is most of the work.
    """
    return counts.total.seconds / max(counts.total.passes, counts.total.steps, 1.0)


def best_interval(times: PassTimes | None, output_tokens: float) -> int | None:
    """Return the best number of decode steps between two prefill passes; None where it is not known.

    A place that a request leaves stands empty for half of that number on average, so of `output_tokens`
    steps of a request that many are lost; in return there are fewer prefill passes. The number for which both
    are equal is the best: its square is twice the output's length times the pass over the step.
    """
    if times is None or not times.pass_known or output_tokens <= 0:
        return None
    total = times.total
    step_s = (times.step_s * total.steps + times.decoded_s * total.decoded) / max(1.0, total.steps)
    return round(math.sqrt(2 * output_tokens * times.pass_s / step_s)) if step_s else None


def decode_interval(times: PassTimes | None, output_tokens: float) -> tuple[int, float] | None:
    """Return the best number of decode steps between two prefill passes, and its gain."""
    steps = best_interval(times, output_tokens)
    if times is None or steps is None:
        return None
    total = times.total
    if steps < LEAST_INTERVAL or total.passes * steps <= total.steps:
        return None
    busy = 1 - steps / 2 / output_tokens  # share of the places that decode
    if busy <= 0:
        return None
    more = total._replace(steps=total.steps / busy, passes=total.steps / busy / steps)
    return steps, times.seconds_of(total) / times.seconds_of(more)


def _gain(times: PassTimes, saved_s: float) -> float:
    total_s = times.seconds_of(times.total)
    return total_s / max(total_s - saved_s, total_s / 100)
