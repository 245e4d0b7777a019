"""A Redis as `proofline up` has it, of a test's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
