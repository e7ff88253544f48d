"""The background law on servers with users in bursts, in virtual time: users notice little, time is used."""

import pytest

from batchrunner.core.engine_info import QueueBand
from batchrunner.dispatch.concurrency.background import BackgroundController
from batchrunner.dispatch.concurrency.law import Reading
from batchrunner.engines.simulation.scheduler import SchedulerConfig
from tests.support.shared_engine import SharedEngine, p99

SECONDS = 40.0


@pytest.mark.parametrize("priorities", [True, False])
@pytest.mark.parametrize(("slots", "pool"), [(32, 100_000), (128, 30_000)])
def test_users_do_not_wait_and_the_rest_is_used(slots: int, pool: int, *, priorities: bool) -> None:
    """Users have their first token as if alone, also where the pool is the limit; gaps lengthen by a pass."""
    config = SchedulerConfig(slots, pool)
    alone = SharedEngine([10], priorities=priorities, ours=False, config=config).run(SECONDS).schedulers()[0]
    engine = SharedEngine([10], priorities=priorities, config=config).run(SECONDS)
    shared = engine.schedulers()[0]
    assert not shared.sent_at
    assert p99(shared.first_token_passes) <= p99(alone.first_token_passes) + 1
    assert p99(shared.gaps) <= p99(alone.gaps) + 1
    fits = min(slots, pool / 290)  # tokens of a row that runs
    users = sum(users for users, _ in engine.running) / len(engine.running)
    ours = sum(ours for _, ours in engine.running) / len(engine.running)
    assert ours / (fits - users) >= (0.7 if priorities else 0.55)
    assert engine.lost < 0.1 * engine.ended


def test_what_is_not_known_is_not_used() -> None:
    """Without fresh gauges nothing is sent; a refusal of the server is heeded for a while."""
    law = BackgroundController("r", 100, QueueBand(100, 2000), most=1000, now=0.0, yields=True)
    law.sample(0.1, Reading(0, 0, 0, 0.0, max_running=32))
    assert law.window > 30
    law.backpressure(0.2, "503")
    narrower = law.window
    law.sample(0.3, Reading(0, 0, 0, 0.0, max_running=32))
    assert law.window == narrower < 30
    law.tick(60.0)
    assert law.window == 0


@pytest.mark.parametrize(("slots", "fits"), [(1, 100), (32, 1)])
@pytest.mark.parametrize("yields", [True, False])
def test_the_smallest_server_is_used_while_nobody_is_there(slots: int, fits: int, *, yields: bool) -> None:
    """One slot, or a pool for one row, is not kept free for ever; a user alone has it."""
    law = BackgroundController("r", fits, QueueBand(100, 2000), most=1000, now=0.0, yields=yields)
    law.sample(0.1, Reading(0, 0, 0, 0.0, max_running=slots))
    assert law.window >= 1
    for poll in range(1, 6):
        law.sample(0.1 + poll, Reading(slots, 2, 0, 0.0, max_running=slots))
    assert law.window == 0


def test_rows_without_decoding_go_on() -> None:
    """They run in no gauge, and wait in the queue: that is not taken for a server that is full."""
    law = BackgroundController("r", 100, QueueBand(100, 2000), most=1000, now=0.0, yields=False)
    for poll in range(20):
        law.sample(poll / 10, Reading(0, 20, 40, 10.0 * poll, max_running=256))
    assert law.window > 30


def test_the_loaded_replica_is_left_to_its_users() -> None:
    """The idle one of two replicas does nearly all the work."""
    engine = SharedEngine([60, 0], priorities=True, config=SchedulerConfig(32, 100_000)).run(SECONDS)
    loaded, idle = (route.ended.rows for route in engine.limits.routes)
    assert idle > 1.2 * loaded
