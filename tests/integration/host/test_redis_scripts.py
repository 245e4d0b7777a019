"""Scripts in a Redis with users: who loads them, what holds Redis up, and who ends that."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from kombu.transport.redis import REFRESH_BINDING
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from api.health.judgement import Level, Snapshot, judge
from api.health.redis_watch import BUSY, UNKILLABLE, RedisWatch
from cli.examine.redis import server as findings_of
from poc_core.redis_at.connections import is_transient
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.client import connect
from poc_core.state.scripts import ScriptsMissingError
from tests.harness.waiting import wait_until
from tests.stacks.local_compose import LocalCompose
from workers.queue.app import create_app

pytestmark = pytest.mark.integration

As = Callable[[str], Redis]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCompose]:
    with LocalCompose(tmp_path_factory.mktemp("scripts")) as running:
        running.start("redis")
        running.wait_healthy("redis")
        yield running


@pytest.fixture
def as_user(compose: LocalCompose) -> Iterator[As]:
    """Connections of users, each with a timeout that neither a script of ours nor a busy machine
    needs.
    """
    with ExitStack() as exits:

        def connection(user: str) -> Redis:
            url = compose.redis_url
            if user != "default":
                url = compose.redis_url_of(user, compose.secret(f"{user}_redis_password"))
            settings = Settings(redis_url=url)
            client = connect(settings, patient=False, timeout_s=60.0)
            exits.callback(client.close)
            return client

        operator = connection("default")
        exits.callback(wait_until, lambda: is_free(operator), "a Redis without a script")
        operator.script_flush()
        operator.config_set("lua-time-limit", 300)  # of 5,000 ms
        yield connection


def is_free(operator: Redis) -> bool:
    """Whether no script runs; one that a test which failed has left is killed."""
    try:
        return bool(operator.ping())
    except RedisError:
        with contextlib.suppress(RedisError):
            operator.script_kill()
        return False


def hold_up(as_user: As, script: str) -> threading.Thread:
    """Runs a script; returns when Redis says to others that it is busy with it."""
    operator, other = as_user("default"), as_user("worker")

    def run() -> None:
        with contextlib.suppress(RedisError):  # it is killed, or lasts longer than we wait
            operator.eval(script, 0)

    def is_busy() -> bool:
        try:
            other.get("poc:queued_nonces")
        except RedisError as error:
            return "BUSY" in str(error)
        return False

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(is_busy, "a Redis that is busy")
    return thread


@pytest.mark.promise(
    "a Redis user",
    "can use the node's scripts again after Redis has lost the scripts",
)
@pytest.mark.parametrize("user", ["worker", "courier", "flower"])
def test_what_redis_has_forgotten_the_api_loads_for_those_who_may_not(
    as_user: As, user: str
) -> None:
    theirs = scripts.SharedScript(as_user(user), scripts.source("common") + "return 7")
    known = scripts.load(as_user(user), "count_jobs")
    for script in (theirs, known):
        with pytest.raises(ScriptsMissingError) as missing:
            script()
        assert is_transient(missing.value)  # so it is waited out, as a Redis that is away
    with pytest.raises(ScriptsMissingError):
        scripts.wait_until_loaded(as_user(user), 0.0)
    RedisWatch(as_user("api"), time.time).look()
    scripts.wait_until_loaded(as_user(user), 0.0)
    assert as_user(user).script_exists(known.sha) == [True]
    with pytest.raises(ScriptsMissingError):
        theirs()


def test_celerys_scripts_are_the_apis_too(compose: LocalCompose, as_user: As) -> None:
    url = compose.redis_url_of("worker", compose.secret("worker_redis_password"))
    with create_app(url, "worker").connection_for_read() as connection:
        client = connection.default_channel.client
        lock = client.lock("unacked.worker.mutex", timeout=300)
        assert lock.acquire(blocking=False)
        with pytest.raises(ScriptsMissingError):
            lock.release()
        refresh = client.register_script(REFRESH_BINDING)
        with pytest.raises(ScriptsMissingError):
            refresh(["_kombu.binding.x", "y"], ["member", "x", 1], client=client.pipeline())
        RedisWatch(as_user("api"), time.time).look()
        lock.local.token = as_user("default").get("unacked.worker.mutex")  # it is tried again
        lock.release()
        assert as_user("default").exists("unacked.worker.mutex") == 0
        with client.pipeline() as pipe:
            refresh(["_kombu.binding.x", "_kombu.binding.y"], ["member", "x", 1], client=pipe)
            pipe.execute()
        assert as_user("default").smembers("_kombu.binding.x") == {b"member"}


@pytest.mark.promise(
    "a Redis script that does not end",
    "is reported and killed; no argument makes one of our scripts endless",
)
def test_a_script_that_does_not_end_is_told_and_killed(as_user: As) -> None:
    watch = RedisWatch(as_user("api"), time.time)
    thread = hold_up(as_user, "while true do end")
    with pytest.raises(ResponseError, match="BUSY") as busy:
        as_user("worker").get("poc:queued_nonces")
    assert is_transient(busy.value)
    watch.note_away(busy.value)
    health = judge(Snapshot(time.time(), None, watch.away_since, watch.trouble))
    assert (health.level, [reason.what for reason in health.reasons]) == (Level.DOWN, [BUSY])
    watch.look()
    thread.join(60)
    watch.look()
    assert watch.away_since is None
    assert as_user("worker").get("poc:queued_nonces") is None


@pytest.mark.promise(
    "a Redis script that does not end",
    "is reported and killed; no argument makes one of our scripts endless",
)
def test_a_script_that_has_written_is_told_with_what_ends_it(
    compose: LocalCompose, as_user: As
) -> None:
    watch = RedisWatch(as_user("api"), time.time)
    thread = hold_up(as_user, "redis.call('SET', 'x', 1) while true do end")
    try:
        watch.look()
        assert watch.trouble == UNKILLABLE
        assert "SHUTDOWN NOSAVE" in judge(
            Snapshot(time.time(), None, watch.away_since, watch.trouble)
        ).text(time.time())
    finally:
        as_user("default").shutdown(nosave=True)
        compose.processes.pop("redis").wait(60)
        thread.join(60)  # before the start: it might send the script once more
        compose.start("redis")
    assert not thread.is_alive()

    def is_back() -> bool:
        watch.look()
        return watch.away_since is None

    wait_until(is_back, "another Redis")


def test_doctor_tells_of_a_script_that_does_not_end(compose: LocalCompose, as_user: As) -> None:
    thread = hold_up(as_user, "while true do end")
    found = list(findings_of(Settings(redis_url=compose.redis_url)))
    assert [(one.about, one.level) for one in found] == [("redis", "problem")]
    assert "busy with a script" in found[0].says
    assert "SCRIPT KILL" in found[0].remedy
    as_user("api").script_kill()
    thread.join(60)


@pytest.mark.promise(
    "a Redis script that does not end",
    "is reported and killed; no argument makes one of our scripts endless",
)
def test_no_argument_makes_a_script_run_without_end(as_user: As) -> None:
    RedisWatch(as_user("api"), time.time).look()
    worker, courier = as_user("worker"), as_user("courier")
    huge = "1e15"
    worker.hset("poc:job:j", mapping={"status": "running", "spec": "s", "n_batches": huge})
    worker.hset("poc:job:j", "model", "m")
    line, room, jobs = "poc:jobs:line:m", "1e15", "1e15"
    worker.zadd(line, {"j": 1})
    lease = scripts.load(worker, "lease")
    asked: list[str | int] = ["w|1|n1", 1, "-inf", "+inf", "s", room, jobs, 60, "", huge, huge, 60]
    assert lease([line, keys.generating("m")], asked) == []
    names = [f"poc:job:{n}" for n in range(9)]
    scripts.load(worker, "read_overview")(names, [1000, huge, 10])
    for field, value in (("token", "t"), ("in_flight", huge), ("in_flight_artifacts", "1")):
        courier.hset("poc:outbox:o", field, value)
    courier.lpush("poc:outbox:o:entries", "1|x")
    delivered: list[str | int] = ["t", "delivered", 1, "", 1, 60, 100, 1000]
    assert scripts.load(courier, "end_delivery")(["poc:outbox:o"], delivered) == 1
