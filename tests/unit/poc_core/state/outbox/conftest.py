"""A node's outboxes, where a payload holds ten artifacts at most."""

import pytest
from redis import Redis

from poc_core.records import RoundRecord
from poc_core.settings import Settings
from tests.harness.outbox import Box
from tests.harness.samples import Clock


@pytest.fixture
def settings() -> Settings:
    return Settings(callback_max_artifacts=10)


@pytest.fixture
def box(redis: Redis, settings: Settings, clock: Clock) -> Box:
    return Box(redis, settings, clock)


@pytest.fixture
def waiting(box: Box) -> RoundRecord:
    """A round of which four artifacts are due."""
    record = box.start()
    box.compute(record)
    box.interval_passes()
    return record
