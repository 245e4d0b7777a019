"""Downloads of models: jobs that outlive the API's process, each computed by a process of its
own.
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redis import Redis

from poc_core.state import keys, scripts

# At a time over the whole node, as the network's client expects (mlnode).
MOST_AT_A_TIME = 3
# Seconds without a sign of life after which a download's process is dead; it gives one every third
# of them.
ALIVE_S = 15
# Seconds that a download is remembered, counted anew with each change.
_KEPT_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Download:
    """One repository at one revision. Times are seconds since the epoch."""

    task_id: str
    hf_repo: str
    hf_commit: str | None
    machine: str  # whose cache it goes to
    started_at: float
    state: Literal["running", "done", "failed"] = "running"
    error: str | None = None

    @property
    def name(self) -> str:
        return name_of(self.hf_repo, self.hf_commit)


class DownloadStore:
    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock
        self._start = scripts.load(redis, "start_download")

    def start(
        self, hf_repo: str, hf_commit: str | None, machine: str
    ) -> Download | Literal["running", "full"]:
        """Stores a download as running, or says why not."""
        new = Download(uuid.uuid4().hex, hf_repo, hf_commit, machine, self._clock())
        args: list[Any] = [new.name, json.dumps(asdict(new)), MOST_AT_A_TIME, _KEPT_S]
        reason = self._start([keys.DOWNLOADS, keys.DOWNLOADS_RUNNING], args).decode()
        return new if reason == "ok" else "running" if reason == "running" else "full"

    def read(self, hf_repo: str, hf_commit: str | None) -> Download | None:
        return self.by_name(name_of(hf_repo, hf_commit))

    def by_name(self, name: str) -> Download | None:
        raw = self._redis.hget(keys.DOWNLOADS, name)
        return None if raw is None else Download(**json.loads(raw))

    def running(self) -> list[Download]:
        names = sorted(name.decode() for name in self._redis.smembers(keys.DOWNLOADS_RUNNING))
        return [
            found
            for name in names
            if (found := self.by_name(name)) is not None and found.state == "running"
        ]

    def end(self, download: Download, error: str | None = None) -> None:
        """It is done, or failed with `error`."""
        ended = asdict(download) | {"state": "done" if error is None else "failed", "error": error}
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.srem(keys.DOWNLOADS_RUNNING, download.name)
            pipe.hset(keys.DOWNLOADS, download.name, json.dumps(ended))
            pipe.expire(keys.DOWNLOADS, _KEPT_S)
            pipe.execute()

    def forget(self, hf_repo: str, hf_commit: str | None) -> bool:
        """Cancels it; its process sees that. Whether it ran."""
        name = name_of(hf_repo, hf_commit)
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.srem(keys.DOWNLOADS_RUNNING, name)
            pipe.hdel(keys.DOWNLOADS, name)
            return bool(pipe.execute()[0])

    # The process that downloads.

    def claim(self, download: Download) -> bool:
        """One process at a time downloads it."""
        return bool(
            self._redis.set(keys.download_alive(download.task_id), "1", nx=True, ex=ALIVE_S)
        )

    def renew(self, download: Download) -> bool:
        """Says that the process lives. Whether it is still wanted."""
        self._redis.set(keys.download_alive(download.task_id), "1", ex=ALIVE_S)
        found = self.by_name(download.name)
        return found is not None and found.task_id == download.task_id

    def leave(self, download: Download) -> None:
        """The process ends, so that another may begin at once."""
        self._redis.delete(keys.download_alive(download.task_id))

    def is_alive(self, download: Download) -> bool:
        return bool(self._redis.exists(keys.download_alive(download.task_id)))


def name_of(hf_repo: str, hf_commit: str | None) -> str:
    return f"{hf_repo}@{hf_commit or ''}"
