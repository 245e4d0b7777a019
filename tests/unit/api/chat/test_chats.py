"""Chats that pass through, counted for the history."""

import fakeredis
import pytest
from redis import ConnectionError as RedisConnectionError
from redis import Redis

from api.chat.chats import Chats
from poc_core.state.history import CHAT_MS, CHATS, FAILED, History, bucket
from tests.harness.samples import Clock


@pytest.fixture
def chats(clock: Clock) -> Chats:
    return Chats(clock)


def test_requests_count_when_they_begin_and_their_time_while_they_last(
    chats: Chats, redis: Redis, clock: Clock
) -> None:
    history = History(redis)
    with chats.under_way("m") as one, chats.under_way("m"):
        clock.now += 2
        one.first_token()
        chats.report(history, 1_000_000)
        assert history.read(5, 1_000_000, 1) == [{CHATS: 2, CHAT_MS: 4000, bucket(2.0): 1}]
        clock.now += 1
    chats.report(history, 1_000_005)
    assert history.read(5, 1_000_005, 1) == [{CHAT_MS: 2000}]


def test_one_measure_goes_to_the_history_and_to_prometheus(
    chats: Chats, redis: Redis, clock: Clock
) -> None:
    with chats.under_way("m") as one:
        clock.now += 2
        one.first_token()
        clock.now += 1
        one.ended()
    history = History(redis)
    chats.report(history, 1_000_000)
    assert history.read(5, 1_000_000, 1) == [{CHATS: 1, CHAT_MS: 3000, bucket(2.0): 1}]
    told = {
        sample.name: sample.value
        for histogram in (chats.first_token, chats.whole)
        for family in histogram.collect()
        for sample in family.samples
    }
    assert told["proofline_chat_first_token_seconds_sum"] == 2
    assert told["proofline_chat_request_seconds_sum"] == 3


def test_where_nothing_happened_nothing_is_told(chats: Chats, redis: Redis) -> None:
    chats.report(History(redis), 1_000_000)
    assert redis.keys("*") == []


def test_what_redis_did_not_take_is_told_later(chats: Chats) -> None:
    server = fakeredis.FakeServer()
    history = History(fakeredis.FakeRedis(server=server))
    with chats.under_way("m") as one:
        one.failed()
    server.connected = False
    with pytest.raises(RedisConnectionError):
        chats.report(history, 1_000_000)
    server.connected = True
    chats.report(history, 1_000_000)
    assert history.read(5, 1_000_000, 1) == [{CHATS: 1, FAILED: 1}]
