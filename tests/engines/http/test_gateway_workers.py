"""Load and model of a gateway's workers, estimated from reports that may be ten seconds old. Pure."""

import heapq
import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest

from batchrunner.core.engine_info import EngineInfo, QueueBand
from batchrunner.core.errors import AnotherModelError
from batchrunner.core.types import Completion
from batchrunner.dispatch.concurrency.law import tokens_a_row
from batchrunner.dispatch.concurrency.limits import ConcurrencyLimits
from batchrunner.dispatch.route import Routes
from batchrunner.engines.http.gateway_workers import GatewayWorker, LoadEstimate, WorkerLoad, WorkerWatch
from batchrunner.engines.simulation.replica import CostModel, Replica
from batchrunner.engines.simulation.scheduler import SchedulerConfig, SimulatedRequest

WORKER = "http://10.0.0.1:30000"


def reported(running: int, waiting: int, *, limit: int | None = 64, at: str = "12:00:00") -> WorkerLoad:
    return WorkerLoad(
        num_running_reqs=running, num_waiting_reqs=waiting, max_running_requests=limit, reported_at=at
    )


def running_and_queue(estimate: LoadEstimate, in_flight: int) -> tuple[int, int]:
    load = estimate.load_at(7.0, in_flight=in_flight, scheduler="s", route="r")
    return load.running, load.queue


@pytest.mark.parametrize(
    ("report", "in_flight", "load"),
    [
        (reported(32, 68), 100, (32, 68)),
        (reported(32, 38), 100, (62, 38)),  # 30 are on their way
        (reported(10, 0), 100, (100, 0)),  # it has room for 54 more
        (reported(64, 0), 100, (100, 0)),
        (reported(64, 200), 100, (64, 200)),  # most requests came through another gateway
    ],
)
def test_the_load_at_a_report(report: WorkerLoad, in_flight: int, load: tuple[int, int]) -> None:
    """Requests that neither run nor wait are on their way, and do not count as queued."""
    estimate = LoadEstimate()
    estimate.observe(report, in_flight)
    assert running_and_queue(estimate, in_flight) == load


def test_the_queue_between_two_reports() -> None:
    """It follows the requests in flight; as many are at work as the last reports have shown."""
    estimate = LoadEstimate()
    estimate.observe(reported(64, 6), 100)
    estimate.observe(reported(64, 6), 160)  # still the old report
    assert running_and_queue(estimate, 160) == (94, 66)
    assert running_and_queue(estimate, 80) == (80, 0)
    estimate.observe(reported(20, 60, at="12:00:01"), 100)  # between two batches
    assert running_and_queue(estimate, 160) == (94, 66)
    estimate.observe(WorkerLoad(max_running_requests=64), 80)  # the gateway could not read a report
    assert running_and_queue(estimate, 160) == (94, 66)
    estimate.observe(reported(40, 0, at="12:00:02"), 90)  # starved: 24 more can run
    assert running_and_queue(estimate, 160) == (114, 46)


def test_before_the_first_report() -> None:
    """The load has no time, so no window follows it; an idle worker shows nothing either."""
    estimate = LoadEstimate()
    for report in (WorkerLoad(), reported(0, 0)):
        estimate.observe(report, 0)
        assert estimate.load_at(7.0, in_flight=100, scheduler="s", route="r").taken_at == 0.0
    estimate.observe(reported(1, 0, at="12:00:01"), 100)
    assert estimate.load_at(7.0, in_flight=100, scheduler="s", route="r").taken_at == 7.0


class GatewayInVirtualTime:
    """Two simulated workers behind a gateway, which reads their loads from time to time.

    A row is under way for about `transit_s` to the worker, and its answer for as long back. Without reports
    (`report_every_s` is None), the workers' own gauges are read.
    """

    def __init__(
        self,
        *,
        rows: int,
        transit_s: float,
        report_every_s: float | None,
        pool: tuple[int, int] = (32, 40_000),
        prompt_tokens: int = 60,
        outputs: tuple[int, int] = (8, 24),
        fixed: int | None = None,
    ) -> None:
        """`pool` is max_running_requests and max_total_tokens of a worker; `fixed` a window for both."""
        config = SchedulerConfig(*pool)
        cost = CostModel(base_s=0.03, sample_s=0.0005, kv_token_s=0.0, prefill_token_s=1e-4)
        self.workers = {url: Replica(config, cost, url, url) for url in ("a", "b")}
        self._rows, self._unsent = rows, rows
        self._prompt_tokens, self._outputs = prompt_tokens, outputs
        self._transit_s, self._report_every_s = transit_s, report_every_s
        self._luck = random.Random(1)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, str, SimulatedRequest, bool]] = []
        info = EngineInfo(kind="gateway", model="m", routes=tuple(self.workers))
        self._limits = ConcurrencyLimits(info, QueueBand(), tokens_a_row(outputs[1]), most=10**6, fixed=fixed)
        self._estimates = {url: LoadEstimate() for url in self.workers}
        self._reports = dict.fromkeys(self.workers, WorkerLoad(max_running_requests=32))
        self._routes = Routes()
        self.now = 0.0

    def queues(self) -> Iterator[int]:
        """Send all rows; yield the queue of each worker, four times a second, while rows remain."""
        self._poll(0.0)
        next_poll_s, next_report_s, ended = 0.25, 0.0, 0
        while ended < self._rows:
            self.now += 0.05
            ended += self._move()
            self._send()
            if self.now < next_poll_s:
                continue
            next_poll_s += 0.25
            if self._report_every_s is not None and self.now >= next_report_s:
                next_report_s += self._report_every_s
                self._report()
            self._poll(self.now)
            if self._unsent > self._routes.in_flight:
                yield from (worker.scheduler.queue for worker in self.workers.values())

    def _move(self) -> int:
        """Let rows arrive at the workers, and answers here; return the number of answers."""
        for url, worker in self.workers.items():
            for end in worker.advance(self.now):
                self._send_on(url, end.sample, is_answer=True)
        answers = 0
        while self._events and self._events[0][0] <= self.now:
            _, _, url, sample, is_answer = heapq.heappop(self._events)
            if not is_answer:
                self.workers[url].scheduler.submit(sample)
                continue
            answers += 1
            self._routes.release_slot(self._routes[url])
            self._routes[url].ended.add(
                Completion([], [], [sample.outputs], self._prompt_tokens, 0, sample.retractions)
            )
        return answers

    def _send(self) -> None:
        while self._unsent and (route := self._routes.acquire_slot(self.now)) is not None:
            self._unsent -= 1
            sample = SimulatedRequest(
                self._prompt_tokens, self._luck.randint(*self._outputs), self._outputs[1]
            )
            self._send_on(route.url, sample, is_answer=False)

    def _send_on(self, url: str, sample: SimulatedRequest, *, is_answer: bool) -> None:
        arrives_at = self.now + self._transit_s * self._luck.uniform(0.5, 1.5)
        heapq.heappush(self._events, (arrives_at, next(self._numbers), url, sample, is_answer))

    def _report(self) -> None:
        for url, worker in self.workers.items():
            self._reports[url] = reported(worker.load.running, worker.load.queue, limit=32, at=str(self.now))

    def _poll(self, now: float) -> None:
        for limit in self._limits.routes:  # before all else, since routes count the limits' ended rows
            limit.in_flight = self._routes.open(limit.url, limit.ended).in_flight
        loads = [] if self._report_every_s else [worker.load for worker in self.workers.values()]
        for url, estimate in self._estimates.items() if self._report_every_s else ():
            in_flight = self._routes[url].in_flight
            estimate.observe(self._reports[url], in_flight)
            loads.append(estimate.load_at(now, in_flight=in_flight, scheduler=url, route=url))
        if self._limits.schedulers:
            self._limits.observe(loads, now, unsent=self._unsent)
        else:
            self._limits.begin(loads, now, unsent=self._unsent)
        for limit in self._limits.routes:
            self._routes[limit.url].window = self._limits.window_of(limit)


@pytest.mark.parametrize(
    ("transit_s", "report_every_s"), [(0.0, 1), (0.5, 1), (1.0, 1), (0.0, 10), (0.5, 10)]
)
def test_the_queue_stays_in_its_band(transit_s: float, report_every_s: float) -> None:
    """In 95 % of the time, also if rows are under way for longer than they run."""
    gateway = GatewayInVirtualTime(rows=3000, transit_s=transit_s, report_every_s=report_every_s)
    queues = list(gateway.queues())
    steady = queues[len(queues) // 5 :]
    band = QueueBand().scaled(32)
    share = sum(band.low <= queue <= band.high for queue in steady) / len(steady)
    assert share >= 0.95


@pytest.mark.parametrize("transit_s", [0.0, 0.5, 1.0])
def test_a_small_pool_stays_full_although_rows_are_under_way(transit_s: float) -> None:
    """At 0.95 of the best fixed window, with a pool of about 30 requests and the workers' own gauges."""

    def seconds(fixed: int | None) -> float:
        gateway = GatewayInVirtualTime(
            rows=600,
            transit_s=transit_s,
            report_every_s=None,
            pool=(64, 12_000),
            prompt_tokens=200,
            outputs=(100, 300),
            fixed=fixed,
        )
        for _ in gateway.queues():
            pass
        return gateway.now

    assert seconds(None) <= min(seconds(2 * 32), seconds(2 * 64)) / 0.95


def listed(weights_gb: float | None, at: str) -> GatewayWorker:
    loads = [] if weights_gb is None else [{"memory": {"weight_gb": weights_gb}}]
    entry = {"url": WORKER, "engine_load": {"timestamp": at, "loads": loads}}
    return msgspec.convert(entry, GatewayWorker)


def test_a_worker_is_in_doubt_until_a_newer_report() -> None:
    """The report in the gateway's list when a row failed may be older than the failure."""
    watch = WorkerWatch(WORKER)
    assert not watch.record_failure()
    assert not watch.in_doubt  # no report has shown the weights
    watch.observe(listed(15.0, "1"))
    assert watch.record_failure()
    assert not watch.record_failure()  # it was away already
    in_doubt = []
    for at, weights_gb in [("2", 15.1), ("2", 15.1), ("3", 15.1), ("4", 14.9), ("", None), ("5", 15.0)]:
        watch.observe(listed(weights_gb, at))
        in_doubt.append(watch.in_doubt)
    assert in_doubt == [True, True, False, False, False, False]
    watch.record_failure()
    watch.observe(listed(None, ""))  # the gateway could not read a report after the failure
    watch.observe(listed(15.0, "6"))
    assert not watch.in_doubt
    with pytest.raises(AnotherModelError, match=r"the memory of the weights in GB was '15.0' and is '20.0'"):
        watch.observe(listed(20.0, "7"))


def test_the_weights_of_a_small_model() -> None:
    """Other processes change the free memory by more than a twentieth of its weights while it loads."""
    watch = WorkerWatch(WORKER)
    for at, weights_gb in enumerate((0.009, 0.021, 0.0)):
        watch.observe(listed(weights_gb, str(at)))
    with pytest.raises(AnotherModelError):
        watch.observe(listed(0.2, "3"))
