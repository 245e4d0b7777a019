"""Checks Sentinels and replicas: whether Redis can fail over to a replica without losing data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from redis.exceptions import RedisError

from cli.examine.findings import Finding, Subject
from poc_core.redis_at import connections
from poc_core.redis_at.url import RedisUrl, address

_SENTINEL = Subject("sentinel")
_REPLICAS = Subject("replicas")
_FEWEST = 3  # one of two Sentinels could not decide alone
_LATE_MS = 5000  # limit of the primary's silence until another primary is chosen
_BEHIND_S = 10
_DOCUMENT = "docs/redis.md, A Redis that fails over"


def sentinels(at: RedisUrl) -> Iterator[Finding]:
    """Checks that the Sentinels in the url answer, and that they know the url's master."""
    asked = connections.Sentinels(at.hosts, at.sentinel)
    told, silent = [], []
    for sentinel in asked.sentinels:
        try:
            with sentinel:
                told.append(connections.states(sentinel))
        except RedisError as error:
            silent.append(f"{asked.name(sentinel)} ({connections.why(error)})")
    known = [masters[at.master] for masters in told if at.master in masters]
    if silent:
        make = _SENTINEL.warning if known else _SENTINEL.problem
        yield make(f"No answer of {', '.join(silent)}.", "Start it, or correct POC_REDIS_URL.")
    if told and not known:
        names = ", ".join(sorted({name for masters in told for name in masters})) or "none"
        yield _SENTINEL.problem(
            f"None knows a master {at.master}; they know {names}.", "Correct POC_REDIS_URL."
        )
    if known:
        yield from _of_master(at.master, known)


def _of_master(name: str, said: list[dict[str, Any]]) -> Iterator[Finding]:
    """Checks that all Sentinels name the same primary, and that their failover is fast enough."""
    primaries = sorted({address((state["ip"], int(state["port"]))) for state in said})
    if len(primaries) > 1:
        yield _SENTINEL.problem(
            f"They name different primaries of {name}: {', '.join(primaries)}.",
            "Wait until they agree; if they do not, look at their logs.",
        )
    n = 1 + max(int(state["num-other-sentinels"]) for state in said)
    quorum = max(int(state["quorum"]) for state in said)
    text = f"{len(said)} answer, {primaries[0]} is the primary of {name} (quorum {quorum} of {n})"
    if n < _FEWEST or quorum > n // 2 + 1 or quorum < 2:
        yield _SENTINEL.warning(
            f"{text[0].upper()}{text[1:]}.",
            f"Run {_FEWEST} Sentinels or more, on hosts of their own, with a quorum of half of"
            " them and one more.",
        )
    else:
        yield _SENTINEL.ok(text)
    late_ms = max(int(state["down-after-milliseconds"]) for state in said)
    if late_ms > _LATE_MS:
        yield _SENTINEL.warning(
            f"down-after-milliseconds is {late_ms}: for so long nothing is computed or answered.",
            f"redis-cli -p 26379 SENTINEL SET {name} down-after-milliseconds 2000, at each.",
        )


def replicas(info: Mapping[str, Any], needed: bool) -> Iterator[Finding]:
    """Checks the replicas in `info`, the primary's INFO. `needed`: True if one is required."""
    found = [value for name, value in info.items() if re.fullmatch(r"slave\d+", name)]
    if not found:
        if needed:
            yield _REPLICAS.problem(
                "The primary has no replica: when it dies, nothing takes its place.",
                f"Start two ({_DOCUMENT}).",
            )
        return
    behind = [one for one in found if one["state"] != "online" or one.get("lag", 0) > _BEHIND_S]
    if behind:
        names = ", ".join(address((one["ip"], one["port"])) for one in behind)
        yield _REPLICAS.warning(f"Behind: {names}.", "Look at its log, and at the network.")
    else:
        yield _REPLICAS.ok(f"{len(found)} replica(s) keep up")
    # INFO has the field only if both options are set.
    if "min_slaves_good_slaves" not in info:
        yield _REPLICAS.warning(
            "min-replicas-to-write is 0: a primary without replicas accepts writes that a failover"
            " loses.",
            "redis-cli CONFIG SET min-replicas-to-write 1, and the same in each redis.conf"
            f" ({_DOCUMENT}).",
        )
