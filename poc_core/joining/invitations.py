"""Invitations of hosts in Redis. The operator writes an invitation; the API returns it only once.

A token is identified by the hash of its id. The API can access the keys `poc:invite:*`, but cannot
create Redis users. The hosts and their Redis users are in `proofline:hosts`, which only the
operator's Redis user can read.
"""

import math
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from redis import Redis

from poc_core.errors import ProoflineError
from poc_core.joining.offers import SealedOffer
from poc_core.joining.tokens import hashed

HOSTS = "proofline:hosts"  # hash: name -> json of HostUser; no TTL: a host may be off for a month
# Seconds for which a revoked token is distinguished from an unknown token.
REVOKED_S = 30 * 86400


class State(StrEnum):
    """The state of a host's invitation."""

    INVITED = "invited"
    EXPIRED = "expired"
    JOINED = "joined"
    REVOKED = "revoked"


class HostUser(BaseModel, frozen=True):
    """The Redis user (ACL account) of a host. Only the operator can read this record."""

    user: str
    password_sha256: str
    token_sha256: str  # SHA-256 of the token's id, which identifies the invitation
    invited_at: float  # seconds since the epoch


class Invitation(BaseModel, frozen=True):
    """An invitation of a host. Times are seconds since the epoch."""

    name: str  # the host's name
    expires_at: float
    redis: str  # host:port that the host will connect to
    used_at: float | None = None
    used_from: str = ""
    revoked_at: float | None = None

    def state(self, now: float) -> State:
        if self.revoked_at is not None:
            return State.REVOKED
        if self.used_at is not None:
            return State.JOINED
        return State.EXPIRED if now >= self.expires_at else State.INVITED


class UnknownTokenError(ProoflineError):
    """The node knows no token with this id."""


class SpentTokenError(ProoflineError):
    """The token was used, has expired or is revoked; the error's text says which."""


class Invitations:
    """The store of invitations. Repeating an operation is safe."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock

    # For the operator, whose rights no process of a node has.

    def hosts(self) -> dict[str, HostUser]:
        found = self._redis.hgetall(HOSTS)
        return {name.decode(): HostUser.model_validate_json(raw) for name, raw in found.items()}

    def add(self, host: HostUser, invitation: Invitation, offer: SealedOffer) -> None:
        """Stores a host, its invitation, and the offer, which expires with the invitation."""
        key = _key(host.token_sha256)
        valid_s = invitation.expires_at - self._clock()
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(HOSTS, invitation.name, host.model_dump_json())
            pipe.hset(key, mapping=invitation.model_dump(exclude_unset=True))
            pipe.set(_offer(key), offer.model_dump_json(), px=max(1, int(valid_s * 1000)))
            pipe.execute()

    def revoke(self, name: str, host: HostUser) -> None:
        """Deletes a host. Its invitation is reported as revoked for REVOKED_S seconds."""
        key = _key(host.token_sha256)
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(HOSTS, name)
            pipe.hset(key, mapping={"name": name, "expires_at": 0, "redis": ""})
            pipe.hset(key, "revoked_at", self._clock())
            pipe.expire(key, REVOKED_S)
            pipe.delete(_offer(key))
            pipe.execute()

    # For the API.

    def find(self, token_id: str) -> Invitation:
        """Returns the invitation of the token with this id. UnknownTokenError if there is none."""
        return self.of_hash(hashed(token_id))

    def of_hash(self, token_sha256: str) -> Invitation:
        found = self._redis.hgetall(_key(token_sha256))
        if not found:
            raise UnknownTokenError(
                "The token is wrong: the node does not know it; its operator makes one with"
                " `proofline hosts invite`."
            )
        fields = {name.decode(): value.decode() for name, value in found.items()}
        return Invitation.model_validate(fields)

    def take(self, token_id: str, peer: str) -> tuple[Invitation, SealedOffer]:
        """Returns the invitation and the offer of a token, only once. UnknownTokenError if the
        token is unknown, SpentTokenError if it is not valid any more. `peer`: the client's address.
        """
        invitation = self.find(token_id)
        _check_open(invitation, self._clock())
        key = _key(hashed(token_id))
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(_offer(key))
            pipe.delete(_offer(key))
            pipe.hsetnx(key, "used_at", self._clock())
            pipe.hsetnx(key, "used_from", peer)
            raw, _, is_first, _ = pipe.execute()
        if raw is None and is_first:  # expired by Redis' clock, or revoked since `find`
            self._redis.hdel(key, "used_at", "used_from")
            _check_open(self.find(token_id), math.inf)
        if raw is None:
            raise SpentTokenError(
                f"The token of {invitation.name} was used by somebody else at this very moment."
            )
        return invitation, SealedOffer.model_validate_json(raw)


def _check_open(invitation: Invitation, now: float) -> None:
    match invitation.state(now):
        case State.JOINED:
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(invitation.used_at))
            why = (
                f"was used at {when}, from {invitation.used_from}; if that was not this host,"
                " somebody else has it"
            )
        case State.EXPIRED:
            why = "has expired unused"
        case State.REVOKED:
            why = "is revoked"
        case State.INVITED:
            return
    raise SpentTokenError(
        f"The token of {invitation.name} {why}. The operator makes another: `proofline hosts revoke"
        f" {invitation.name}`, then `hosts invite`."
    )


def _key(token_sha256: str) -> str:
    return f"poc:invite:{token_sha256}"


def _offer(key: str) -> str:
    return f"{key}:offer"
