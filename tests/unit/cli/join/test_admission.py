"""A host that Redis refuses: for good, for a while, or not at all."""

from pathlib import Path

import pytest
from redis import AuthenticationError, Redis
from redis.exceptions import ConnectionError

from cli.join.access import Access
from cli.join.admission import Admission, ShutOutError
from cli.join.asking import Api, ApiAwayError, RefusedError
from poc_core.answers import HostStanding

ACCESS = Access(
    api="https://node:8443", token_id="1d", name="gpu2", redis_url="redis://host-gpu2:pw@h/0"
)


class World:
    """What Redis and the API answer."""

    redis: Exception | None = None
    api: Exception | str = "joined"

    def ping(self, _redis: Redis) -> bool:
        if self.redis is not None:
            raise self.redis
        return True

    def standing(self, _api: Api, token_id: str) -> HostStanding:
        assert token_id == "1d"
        if isinstance(self.api, Exception):
            raise self.api
        return HostStanding.model_validate({"name": "gpu2", "state": self.api, "redis": "h:6379"})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(Redis, "ping", lambda redis: world.ping(redis))
    monkeypatch.setattr(Api, "standing", lambda api, token_id: world.standing(api, token_id))
    return world


REFUSES = AuthenticationError("WRONGPASS invalid username-password pair or user is disabled.")


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("revoked", "Redis refuses host-gpu2, the user of this host: the host is revoked"),
        (RefusedError("Wrong.", 401), "the node knows its token no more"),
    ],
)
def test_a_revoked_host_ends(world: World, api: Exception | str, says: str) -> None:
    told: list[str] = []
    admission = Admission(ACCESS, ACCESS.redis_url, told.append)
    admission.look()
    admission.check()
    world.redis, world.api = REFUSES, api
    admission.look()
    with pytest.raises(ShutOutError, match=says) as shut_out:
        admission.check()
    assert told == [str(shut_out.value)]
    assert "pw" not in told[0]


@pytest.mark.parametrize(
    ("api", "says"),
    [
        ("joined", "hosts restore"),
        (ApiAwayError("No answer"), "may be revoked"),
        (RefusedError("Too many.", 429), "may be revoked"),
    ],
)
def test_a_host_whose_user_is_forgotten_waits_for_it(
    world: World, api: Exception | str, says: str
) -> None:
    told: list[str] = []
    admission = Admission(ACCESS, ACCESS.redis_url, told.append)
    world.redis, world.api = REFUSES, api
    for _ in range(3):
        admission.look()
        admission.check()
    world.redis = ConnectionError("away")
    admission.look()
    admission.check()
    world.redis = None
    admission.look()
    assert [says in told[0], *told[1:]] == [True, "Redis lets this host in"]


def test_a_redis_that_is_away_is_no_refusal(world: World) -> None:
    told: list[str] = []
    admission = Admission(ACCESS, ACCESS.redis_url, told.append)
    world.redis, world.api = ConnectionError("away"), "revoked"
    admission.look()
    admission.check()
    assert told == []


def test_a_start_that_redis_refuses_is_none(world: World, tmp_path: Path) -> None:
    world.redis = REFUSES
    with pytest.raises(ShutOutError, match="hosts restore"):
        Admission(ACCESS, ACCESS.redis_url, lambda _: None).begin()
