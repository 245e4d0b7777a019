"""A courier and the one receiver of a round."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from redis import Redis

from poc_core.records import RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.courier import Offers, Receiver, Scene, compute
from tests.harness.samples import Clock, known, round_config, worker_record
from workers.courier import main as ticker_module
from workers.courier.courier import Courier
from workers.courier.main import Ticker


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def receivers(redis: Redis, clock: Clock) -> Receivers:
    return Receivers(redis, clock)


@pytest.fixture
def courier(outbox: Outbox, receivers: Receivers, receiver: Receiver) -> Courier:
    return Courier(outbox, receivers, receiver.poster)


@pytest.fixture
def record(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock, settings: Settings
) -> RoundRecord:
    """A round of which four artifacts are due."""
    workers.heartbeat(worker_record("w1"))
    started = known(rounds.read(rounds.store(round_config(), RoundState.GENERATING)))
    compute(rounds, started)
    clock.now += settings.callback_interval_sec
    return started


@pytest.fixture
def scene(
    redis: Redis,
    clock: Clock,
    rounds: RoundStore,
    outbox: Outbox,
    courier: Courier,
    receiver: Receiver,
    record: RoundRecord,
) -> Scene:
    return Scene(redis, clock, rounds, outbox, courier, receiver, record)


@pytest.fixture
def offers() -> Offers:
    return Offers()


@pytest.fixture
def ticker(
    outbox: Outbox, offers: Offers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Ticker]:
    monkeypatch.setattr(ticker_module, "ALIVE", tmp_path / "alive")
    ticker = Ticker(outbox, cast(Courier, offers))
    yield ticker
    ticker.stop()
