"""Invitations in Redis: given once, for a while, until they are revoked."""

import pytest
from redis import Redis

from poc_core.joining.invitations import (
    HOSTS,
    REVOKED_S,
    HostUser,
    Invitation,
    Invitations,
    SpentTokenError,
    State,
    UnknownTokenError,
)
from poc_core.joining.offers import Offer, SealedOffer
from poc_core.joining.tokens import Token, hashed
from tests.harness.samples import Clock


@pytest.fixture
def invitations(redis: Redis, clock: Clock) -> Invitations:
    return Invitations(redis, clock)


def invite(invitations: Invitations, clock: Clock, name: str = "gpu2") -> tuple[Token, HostUser]:
    token = Token.new()
    offer = Offer(name=name, user=f"host-{name}", salt="5a17", redis_url="redis://10.0.0.1:6379/0")
    host = HostUser(
        user=offer.user,
        password_sha256=hashed(token.password(offer.salt)),
        token_sha256=hashed(token.id),
        invited_at=clock(),
    )
    invitation = Invitation(name=name, expires_at=clock() + 3600, redis="10.0.0.1:6379")
    invitations.add(host, invitation, SealedOffer.of(offer, token))
    return token, host


@pytest.mark.promise("a host's token", "admits one host, once, before the token expires")
def test_an_offer_is_given_once_and_the_second_is_told_to_whom(
    invitations: Invitations, clock: Clock
) -> None:
    token, _ = invite(invitations, clock)
    assert invitations.find(token.id).state(clock()) is State.INVITED
    invitation, offer = invitations.take(token.id, "10.0.0.2")
    assert (invitation.name, offer.opened(token).user) == ("gpu2", "host-gpu2")
    assert invitations.find(token.id).state(clock()) is State.JOINED
    with pytest.raises(SpentTokenError, match=r"gpu2 was used at 1970.* from 10\.0\.0\.2"):
        invitations.take(token.id, "10.0.0.3")


@pytest.mark.promise("a host's token", "admits one host, once, before the token expires")
def test_of_two_at_the_same_moment_one_gets_the_offer(
    invitations: Invitations, clock: Clock, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, _ = invite(invitations, clock)
    as_it_was = invitations.find(token.id)
    invitations.take(token.id, "10.0.0.2")
    monkeypatch.setattr(invitations, "find", lambda _: as_it_was)  # read before the other took it
    with pytest.raises(SpentTokenError, match="at this very moment"):
        invitations.take(token.id, "10.0.0.3")


@pytest.mark.promise("a host's token", "admits one host, once, before the token expires")
def test_an_expired_offer_is_gone(invitations: Invitations, clock: Clock, redis: Redis) -> None:
    token, host = invite(invitations, clock)
    assert 0 < redis.pttl(f"poc:invite:{host.token_sha256}:offer") <= 3600_000
    clock.now += 3600
    assert invitations.find(token.id).state(clock()) is State.EXPIRED
    with pytest.raises(SpentTokenError, match="has expired unused"):
        invitations.take(token.id, "10.0.0.2")


@pytest.mark.parametrize(("end", "told"), [("expires", "expired unused"), ("revoked", "revoked")])
def test_an_offer_that_ends_at_this_very_moment_was_used_by_nobody(
    invitations: Invitations,
    clock: Clock,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    told: str,
) -> None:
    """The API's clock may be behind that of Redis, which deletes the offer."""
    token, host = invite(invitations, clock)
    find = invitations.find

    def ends(token_id: str) -> Invitation:
        monkeypatch.setattr(invitations, "find", find)
        as_it_was = find(token_id)
        if end == "expires":
            redis.delete(f"poc:invite:{host.token_sha256}:offer")
        else:
            invitations.revoke("gpu2", host)
        return as_it_was

    monkeypatch.setattr(invitations, "find", ends)
    with pytest.raises(SpentTokenError, match=told):
        invitations.take(token.id, "10.0.0.2")
    assert invitations.find(token.id).used_at is None


def test_a_revoked_token_is_told_for_a_month(
    invitations: Invitations, clock: Clock, redis: Redis
) -> None:
    token, host = invite(invitations, clock)
    invitations.revoke("gpu2", host)
    assert invitations.hosts() == {}
    with pytest.raises(SpentTokenError, match="is revoked"):
        invitations.take(token.id, "10.0.0.2")
    key = f"poc:invite:{host.token_sha256}"
    assert redis.exists(f"{key}:offer") == 0
    assert 0 < redis.ttl(key) <= REVOKED_S


def test_a_token_that_never_was_is_unknown(invitations: Invitations, clock: Clock) -> None:
    invite(invitations, clock)
    for wrong in ("", Token.new().id, "*"):
        with pytest.raises(UnknownTokenError, match="proofline hosts invite"):
            invitations.take(wrong, "10.0.0.2")


@pytest.mark.promise(
    "a host's token",
    "appears in no log, environment or process argument; "
    "Redis and the API never receive the token's secrets",
)
def test_redis_holds_neither_token_nor_id_nor_password(
    invitations: Invitations, clock: Clock, redis: Redis
) -> None:
    token, _ = invite(invitations, clock)
    held = str(redis.hgetall(HOSTS))
    for key in redis.keys("poc:invite:*"):
        held += str(key) + str(redis.hgetall(key) if redis.type(key) == b"hash" else redis.get(key))
    assert "host-gpu2" in held
    assert not any(secret in held for secret in (token.text, token.id, token.password("5a17")))
