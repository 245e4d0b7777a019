"""compose's users of Redis on a real server: what each of them may not do.

That they may do what they must is seen where whole nodes run with them (test_broker.py,
test_compose_services.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from cli.supervise.redis_server import version_of
from tests.harness.compose_file import ROOT
from tests.stacks.local_compose import REDIS, LocalCompose

pytestmark = pytest.mark.integration

USERS = ("api", "worker", "courier", "flower")
# What would show or change anything beyond a user's own keys.
NOBODY_MAY = (
    *(
        "KEYS *",
        "SCAN 0",
        "DBSIZE",
        "RANDOMKEY",
        "FLUSHALL",
        "FLUSHDB",
        "CONFIG GET *",
        "CONFIG SET maxmemory 1",
    ),
    *("ACL LIST", "ACL WHOAMI", "MODULE LIST", "SHUTDOWN NOSAVE", "MONITOR", "CLIENT LIST"),
    *(
        "CLIENT KILL TYPE normal",
        "SAVE",
        "REPLICAOF 127.0.0.1 1",
        "MIGRATE 127.0.0.1 1 x 0 1",
        "SLOWLOG GET",
    ),
    *(
        "SCRIPT FLUSH",
        "INFO",
        "GET other",
        "SET other 1",
        "PUBLISH other 1",
        "SUBSCRIBE other",
        "PSUBSCRIBE *",
    ),
)
NOBODY_MAY_RUN = (
    "EVAL return 0",  # while true do end
    "EVAL_RO return 0",
    "SCRIPT HELP",
    "FUNCTION LIST",
    "LCS poc:outbox:1 poc:outbox:2",
    "STRALGO LCS KEYS poc:outbox:1 poc:outbox:2",
    "ZUNIONSTORE poc:outbox:1 1 poc:outbox:2",
    "SETRANGE poc:outbox:1 536870911 x",
)
NOT = {
    "api": (
        "LPUSH poc.other x",
        "HGET unacked.worker x",
        "PUBLISH /0.celery.pidbox x",
        *(
            "BRPOP poc.model.m 1",
            "RPOP poc.model.m",
            "LPOP poc.worker.w",
            "LMPOP 1 poc.model.m LEFT",
        ),
        "LMOVE poc.model.m poc:x LEFT RIGHT",
        "RENAME poc.model.m poc:x",
    ),
    "worker": (
        "HSET poc:receiver:r failures 9",
        "HSET poc:downloads a b",
        "LPUSH poc.other x",
        "HGET unacked.monitor x",
        *(f"LPUSH poc:events:{kind} x" for kind in ("refused", "key", "node")),
        *(f"DEL poc:events:{kind}" for kind in ("refused", "key", "node")),
        *("SCRIPT LOAD x", "SCRIPT KILL"),
    ),
    "courier": (
        *(
            "HGETALL poc:job:1",
            "LRANGE poc:job:1:result 0 -1",
            "HSET poc:deployment model x",
            "GET poc:round:current",
        ),
        *(
            "LPUSH poc.model.m x",
            "BRPOP poc.worker.w 1",
            "HDEL unacked.worker x",
            "RENAME poc:outbox:1 poc:outbox:2",
            "PUBLISH /0.celery.pidbox x",
        ),
        *("HGET poc:worker:w record", "HGETALL poc:worker:w", "ZRANGE poc:workers 0 -1"),
        *("HSET poc:worker:w record {}", "DEL poc:worker:w", "ZREM poc:workers w"),
        *("SCRIPT LOAD x", "SCRIPT KILL"),
        *("DEL poc:events:refused", "LPUSH poc:events:worker x"),
    ),
    "flower": (
        *(
            "HGETALL poc:job:1",
            "HGETALL poc:worker:w",
            "HGETALL poc:round:1",
            "ZRANGE poc:outbox:due 0 -1",
        ),
        *(
            "HSET poc:deployment model x",
            "LPUSH poc.model.m x",
            "RPUSH poc.model.m x",
            "HDEL unacked.worker x",
        ),
        *("SCRIPT LOAD x", "SCRIPT KILL"),
    ),
}
# By keys that may only be read or written, which Redis knows since 7: compose.yaml has that, the
# wheel that tests use has not.
NOT_SINCE_7 = {
    "api": ("LRANGE poc.model.m 0 -1",),
    "courier": ("DEL poc:ports", "ZADD poc:ports 1 22", "ZADD poc:api 1 x"),
    "flower": ("DEL poc.model.m", "BRPOP poc.model.m 1", "RPOP poc.worker.w"),
}
# What no key or channel bounds, and shows nobody anything of others.
WITHOUT_KEYS = {"ping", "select", "multi", "exec", "discard", "unwatch", "time"}


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCompose]:
    with LocalCompose(tmp_path_factory.mktemp("users")) as running:
        running.start("redis")
        running.wait_healthy("redis")
        yield running


def password_of(compose: LocalCompose, user: str) -> str:
    return compose.secret(f"{user}_redis_password")


def refused(client: redis.Redis, command: str) -> bool:
    try:
        client.execute_command(*command.split())
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError as error:  # of a newer release, or an older one
        return "unknown command" in str(error).lower()
    return False


@pytest.mark.promise(
    "a Redis user",
    "has its own password, and cannot run EVAL or exceed its rights",
)
@pytest.mark.promise(
    "a compromised host",
    "cannot write other hosts' records (Redis 7), forge events of keys, "
    "or stay listed without a heartbeat",
)
@pytest.mark.parametrize("user", USERS)
def test_a_user_may_touch_nothing_of_others(compose: LocalCompose, user: str) -> None:
    is_old = (version_of(str(REDIS)) or (0,)) < (7,)
    since_7 = () if is_old else NOT_SINCE_7.get(user, ())
    commands = (*NOBODY_MAY, *NOBODY_MAY_RUN, *NOT[user], *since_7)
    with redis.Redis.from_url(compose.redis_url_of(user, password_of(compose, user))) as client:
        assert client.ping()
        assert [command for command in commands if not refused(client, command)] == []


def commands_of(operator: redis.Redis) -> dict[str, tuple[list[str], bool]]:
    """Each command of the server, or subcommand where it names them (since 7), in words that it
    takes for one, and whether a user's keys and channels bound what it does.
    """
    connection = operator.connection_pool.get_connection()
    connection.send_command("COMMAND")
    told: Any = connection.read_response()
    operator.connection_pool.release(connection)
    found = {}
    for command in [part for one in told for part in (one[9:] and one[9]) or [one]]:
        if b"no_auth" in command[2]:  # whoever connects may, as without a user: HELLO, RESET
            continue
        words = command[0].decode().split("|")
        is_bound = command[3] > 0 or bool({b"movablekeys", b"pubsub"} & set(command[2]))
        arguments = ["x"] * (abs(command[1]) - len(words))
        found["|".join(words)] = [*words, *arguments], is_bound
    return found


def may_run(client: redis.Redis, words: list[str]) -> bool:
    """Whether the user may run the command at all, be it with no key."""
    try:
        client.execute_command(*words)
        if words == ["multi"]:  # in a transaction, Redis 7 refuses some commands before it asks
            client.execute_command("DISCARD")
    except redis.RedisError as error:
        refusals = ("no permissions to run", "command not allowed")  # DEBUG, MODULE: nobody's
        return not any(refusal in str(error) for refusal in refusals)
    return True


@pytest.mark.promise(
    "a Redis user",
    "can run no command that its rights do not list",
)
@pytest.mark.parametrize("user", USERS)
def test_a_user_may_run_no_command_but_those_named(compose: LocalCompose, user: str) -> None:
    """Of all that this server has: a category would let in those of a newer release too."""
    lines = (ROOT / "docker" / "users.acl").read_text().splitlines()
    words = {word for line in lines if line.startswith(f"user {user} ") for word in line.split()}
    with (
        redis.Redis.from_url(compose.redis_url) as operator,
        redis.Redis.from_url(compose.redis_url_of(user, password_of(compose, user))) as client,
    ):
        client.response_callbacks.clear()
        commands = commands_of(operator)
        assert len(commands) > 200
        allowed = {name for name, (words, _) in commands.items() if may_run(client, words)}
    assert allowed <= {word[1:] for word in words if word.startswith("+")}
    scripts = {
        f"script|{one}" for one in (("exists", "load", "kill") if user == "api" else ("exists",))
    }
    assert {name for name in allowed if not commands[name][1]} - scripts <= WITHOUT_KEYS


@pytest.mark.promise(
    "a Redis user",
    "has its own password, and cannot run EVAL or exceed its rights",
)
@pytest.mark.parametrize("user", USERS)
def test_a_script_may_no_more_than_who_calls_it(compose: LocalCompose, user: str) -> None:
    with (
        redis.Redis.from_url(compose.redis_url) as operator,
        redis.Redis.from_url(compose.redis_url_of(user, password_of(compose, user))) as client,
    ):
        for line in (
            "redis.call('KEYS', '*')",
            "redis.call('SET', 'other', '1')",
            "redis.call('HGETALL', 'other')",
        ):
            with pytest.raises(redis.ResponseError, match=r"can't (run|access)|ACL failure"):
                client.evalsha(operator.script_load(f"return {line}"), 0)


@pytest.mark.promise("a compromised host", "can do only what this page lists")
def test_what_a_workers_password_opens(compose: LocalCompose) -> None:
    """SECURITY.md, A compromised worker host: what is not kept from it, lest that be forgotten."""
    url = compose.redis_url_of("worker", password_of(compose, "worker"))
    can = (
        "HGETALL poc:job:1",
        "HSET poc:job:1:values 0 []",
        "BRPOP poc.model.m 0.01",
        "HSET poc:worker:none-such record {}",
        "HGET poc:worker:another record",
        "RPUSH poc:outbox:1:entries 1|x",
        "HSET poc:deployment wanted {}",
        "PUBLISH /0.celery.pidbox {}",
        "LPUSH poc:events:worker {}",
    )
    with redis.Redis.from_url(url) as client:
        assert [command for command in can if refused(client, command)] == []


@pytest.mark.promise(
    "a Redis user",
    "has its own password, and cannot run EVAL or exceed its rights",
)
def test_each_has_a_password_of_its_own(compose: LocalCompose) -> None:
    passwords = {user: password_of(compose, user) for user in USERS} | {
        "default": compose.secret("redis_password")
    }
    assert len(set(passwords.values())) == len(passwords)
    for user in passwords:
        for other, password in passwords.items():
            # The operator's opens a worker too: what further hosts had before there were users.
            if user == other or (user, other) == ("worker", "default"):
                redis.Redis.from_url(compose.redis_url_of(user, password)).ping()
            else:
                with pytest.raises(redis.AuthenticationError):
                    redis.Redis.from_url(compose.redis_url_of(user, password)).ping()


@pytest.mark.promise("a client of Redis without a password", "gets nothing")
def test_without_a_password_nobody_is_let_in(compose: LocalCompose) -> None:
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(f"redis://127.0.0.1:{compose.redis_port}/0").ping()


def test_the_users_passwords_stand_nowhere_in_what_redis_reads(compose: LocalCompose) -> None:
    users = (compose.folder / "redis" / "users.acl").read_text()
    read = users + compose.secret("redis.conf")
    assert not any(password_of(compose, user) in read for user in USERS)
