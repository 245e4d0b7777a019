"""Checks Redis: its connection, persistence, memory, latency and clock."""

import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from cli.examine import sentinels
from cli.examine.findings import Finding, Subject
from cli.supervise import redis_server
from poc_core.callbacks import without_secret
from poc_core.redis_at import connections
from poc_core.redis_at.connections import NoWritesError, WrongRedisError, is_busy
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S, Settings

_REDIS, _CLOCK = Subject("redis"), Subject("clock")
_LOOKS = 20  # pings; the latency is their median
_SLOW_MS, _TOO_SLOW_MS = 5.0, 100.0  # a batch takes about ten commands
_SKEWED_S = 0.5
_NEARLY_FULL = 0.9
_DOCUMENT = "docs/redis.md, What Redis must promise"


def local_server() -> Iterator[Finding]:
    try:
        binary = redis_server.find_redis_server()
    except redis_server.RedisServerError as error:
        yield _REDIS.problem(str(error))
        return
    version = ".".join(map(str, redis_server.version_of(str(binary)) or ()))
    yield _REDIS.ok(
        f"`proofline up` starts its own: {binary}, {version}. --redis-url looks at one that runs"
    )


def server(
    settings: Settings, clock: Callable[[], float] = time.time, timeout_s: float = REDIS_TIMEOUT_S
) -> Iterator[Finding]:
    """Checks the Redis at POC_REDIS_URL, and its Sentinels. `clock`: returns this host's time."""
    at = RedisUrl.of(settings.redis_url)
    if at.master:
        found = list(sentinels.sentinels(at))
        yield from found
        if any(finding.level == "problem" for finding in found):
            return
    with connections.client(
        at, socket_connect_timeout=timeout_s, socket_timeout=timeout_s
    ) as client:
        try:
            client.ping()
        except (RedisError, OSError, ValueError) as error:
            yield _unreachable(at.shown, without_secret(str(error), settings.redis_url), error)
            return
        try:
            info = client.info("everything")
            yield from _promises(info)
            yield from sentinels.replicas(info, needed=bool(at.master))
        except NoPermissionError as error:
            yield _REDIS.warning(
                f"This user may not run INFO ({error}).",
                "To check Redis' memory and files, use its operator's url.",
            )
        yield from _speed(client)
        yield _clock(client, settings, clock)


def _unreachable(shown: str, why: str, error: Exception) -> Finding:
    if (
        isinstance(error, AuthenticationError | NoPermissionError)
        or "NOAUTH" in why
        or "WRONGPASS" in why
    ):
        return _REDIS.problem(
            f"{shown} refuses the password ({why}).",
            "Correct user and password in POC_REDIS_URL (or POC_REDIS_PASSWORD_FILE): Redis'"
            " `requirepass`.",
        )
    if isinstance(error, NoWritesError):
        return _REDIS.problem(
            "It is a replica and takes no writes.",
            "POC_REDIS_URL must name the one it follows, or Sentinels, which know it.",
        )
    if isinstance(error, WrongRedisError):
        return _REDIS.problem(f"{why[0].upper()}{why[1:]}.", f"See {_DOCUMENT}.")
    if is_busy(error):
        return _REDIS.problem(
            f"{shown} is busy with a script that has run for seconds, and answers nobody.",
            "A running `proofline api` ends the script within seconds. Else run redis-cli SCRIPT"
            " KILL as the operator or, after UNKILLABLE, SHUTDOWN NOSAVE, and then start Redis,"
            " which keeps acknowledged data. Then find out who else has a password of this Redis.",
        )
    if isinstance(error, ResponseError):
        return _REDIS.problem(
            f"{shown} answers {why}.", "Wait until it has read its file, or look at its log."
        )
    return _REDIS.problem(
        f"{shown} does not answer ({why}).",
        "Start it, or correct POC_REDIS_URL; a Redis on another host must `bind` an address that"
        " this one reaches.",
    )


def _promises(info: dict[str, Any]) -> Iterator[Finding]:
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < redis_server.MIN_VERSION:
        yield _REDIS.problem(
            f"Its version is {info['redis_version']}.",
            f"Install {'.'.join(map(str, redis_server.MIN_VERSION))} or newer.",
        )
    else:
        yield _REDIS.ok(f"version {info['redis_version']}")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield _REDIS.problem(
            f"maxmemory-policy is {policy}: a full Redis would delete jobs and rounds.",
            "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
            f" ({_DOCUMENT}).",
        )
    if info.get("aof_enabled") == 0:
        yield _REDIS.problem(
            "appendonly is off: if Redis ends, jobs, rounds and callbacks are lost.",
            f"redis-cli CONFIG SET appendonly yes, and the same in redis.conf ({_DOCUMENT}).",
        )
    if {info.get(f"aof_last_{name}_status", "ok") for name in ("write", "bgrewrite")} != {"ok"}:
        yield _REDIS.problem(
            "It could not write its append-only file.", "Make room on its disk; look at its log."
        )
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > limit * _NEARLY_FULL:
        used_mib, limit_mib = used / 2**20, limit / 2**20
        yield _REDIS.problem(
            f"{used_mib:.0f} of its {limit_mib:.0f} MiB are used; a full Redis refuses writes.",
            "Raise maxmemory.",
        )


def _speed(client: Redis) -> Iterator[Finding]:
    latency_ms = statistics.median(timeit.repeat(client.ping, repeat=_LOOKS, number=1)) * 1000
    text = f"answers in {latency_ms:.1f} ms"
    if latency_ms < _SLOW_MS:
        yield _REDIS.ok(text)
    else:
        make = _REDIS.problem if latency_ms > _TOO_SLOW_MS else _REDIS.warning
        remedy = "Put it on the same network as this host; ping it."
        yield make(f"It {text} (median of {_LOOKS}).", remedy)


def _clock(client: Redis, settings: Settings, clock: Callable[[], float]) -> Finding:
    """Compares this host's clock with Redis' clock, because leases need equal clocks."""
    before = clock()
    seconds, microseconds = client.time()
    skew_s = (before + clock()) / 2 - (seconds + microseconds / 1e6)
    return clock_finding("Redis'", skew_s, settings.heartbeat_s)


def clock_finding(whose: str, skew_s: float, most_s: float = 2.0) -> Finding:
    """Returns a finding about a clock difference of `skew_s`: a problem if it exceeds `most_s`."""
    text = f"his host's clock and {whose} differ by {abs(skew_s):.2f} s"
    if abs(skew_s) <= min(_SKEWED_S, most_s):
        return _CLOCK.ok(f"t{text}")
    make = _CLOCK.problem if abs(skew_s) > most_s else _CLOCK.warning
    remedy = "Keep the clocks of all hosts together: NTP (timedatectl set-ntp true, or chrony)."
    return make(f"T{text}.", remedy)
