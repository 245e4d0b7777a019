"""A Redis as `proofline up` has it: one of a test's own, or one that a test kills."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from cli.supervise.processes import Child, ChildSpec
from cli.supervise.redis_server import LocalRedis, wait_for_redis


@contextmanager
def own_redis(data_dir: Path) -> Iterator[LocalRedis]:
    """Within, it runs and answers; its data lie in the folder."""
    own = LocalRedis(data_dir)
    child = Child(ChildSpec("redis", own.command), lambda *_: None, lambda _: None)
    child.start()
    try:
        wait_for_redis(own.url)
        yield own
    finally:
        child.stop()
        own.release()


def write_before_answers(url: str) -> None:
    """Until Redis is restarted, its file has what it has answered, so SIGKILL loses none of it.

    With `everysec`, Redis delays its writes by up to 2 s while an fsync is under way.
    """
    with redis.Redis.from_url(url) as client:
        client.config_set("appendfsync", "no")
