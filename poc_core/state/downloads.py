"""Downloads of models. A separate process downloads each model, and outlives the API."""

import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any, Literal

from poc_core.state import keys, scripts
from poc_core.state.parsing import readable

# Most simultaneous downloads of this node, as the network node expects (mlnode).
MOST_AT_A_TIME = 3
# Seconds without a sign of life after which a process counts as dead; it sends three in this time.
ALIVE_S = 15
# Seconds for a process's first sign of life: its imports take long on a busy machine.
STARTS_S = 60
# Seconds that a download is remembered after its last change.
_KEPT_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Download:
    """A download of one repository at one revision. Times are seconds since the epoch."""

    task_id: str
    hf_repo: str
    hf_commit: str | None
    machine: str  # whose cache receives the files
    started_at: float
    state: Literal["running", "done", "failed"] = "running"
    error: str | None = None

    @property
    def name(self) -> str:
        return name_of(self.hf_repo, self.hf_commit)


class DownloadStore(scripts.BaseStore):
    """The store of active downloads, and of the result of each model's last download."""

    _start = scripts.of_store("start_download")
    _end = scripts.of_store("end_download")

    def start(
        self, hf_repo: str, hf_commit: str | None, machine: str
    ) -> Download | Literal["running", "full"]:
        """Stores a download and returns it; the caller starts its process. Returns "running" if the
        model is already being downloaded, "full" if MOST_AT_A_TIME downloads are active.
        """
        new = Download(uuid.uuid4().hex, hf_repo, hf_commit, machine, self._clock())
        names = [keys.DOWNLOADS, keys.DOWNLOADS_WANTED, keys.DOWNLOAD_SLOTS]
        record = json.dumps(asdict(new))
        args: list[Any] = [new.name, new.task_id, record, MOST_AT_A_TIME, STARTS_S, _KEPT_S]
        reason = self._start(names, args).decode()
        return new if reason == "ok" else "running" if reason == "running" else "full"

    def read(self, hf_repo: str, hf_commit: str | None) -> Download | None:
        return self.by_name(name_of(hf_repo, hf_commit))

    def by_name(self, name: str) -> Download | None:
        """Returns the download named repository@commit; None if it is missing or unreadable."""
        raw = self._redis.hget(keys.DOWNLOADS, name)
        if raw is None:
            return None
        return readable(f"download {name!r}", lambda: Download(**json.loads(raw)))

    def running(self) -> list[Download]:
        names = sorted(name.decode() for name in self._redis.hkeys(keys.DOWNLOADS_WANTED))
        return [one for one in map(self.by_name, names) if one and one.state == "running"]

    def end(self, download: Download, error: str | None = None) -> bool:
        """Stores a download's success or `error`. Returns False if the download was cancelled."""
        ended = asdict(download) | {"state": "done" if error is None else "failed", "error": error}
        args: list[Any] = [download.name, download.task_id, json.dumps(ended), _KEPT_S]
        return bool(self._end([keys.DOWNLOADS, keys.DOWNLOADS_WANTED], args))

    def forget(self, hf_repo: str, hf_commit: str | None) -> bool:
        """Cancels a download, so that its process ends at the next `renew`. Returns False if the
        download was not active.
        """
        name = name_of(hf_repo, hf_commit)
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(keys.DOWNLOADS_WANTED, name)
            pipe.hdel(keys.DOWNLOADS, name)
            return bool(pipe.execute()[0])

    def claim(self, download: Download) -> bool:
        """Returns True if the download has no process. The caller must then start a process."""
        return bool(self._redis.set(keys.download(download.task_id), "1", nx=True, ex=STARTS_S))

    def is_alive(self, download: Download) -> bool:
        """Returns True if the download's process starts or has given a sign of life lately."""
        return bool(self._redis.exists(keys.download(download.task_id)))

    # The process that downloads.

    def renew(self, download: Download) -> bool:
        """Stores that the download's process is alive. Returns False if it was cancelled."""
        self._redis.set(keys.download(download.task_id), "1", ex=ALIVE_S)
        wanted = self._redis.hget(keys.DOWNLOADS_WANTED, download.name)
        return bool(wanted == download.task_id.encode())

    def leave(self, task_id: str) -> None:
        """Stores that the download's process has ended, so another process may start."""
        self._redis.delete(keys.download(task_id))


def name_of(hf_repo: str, hf_commit: str | None) -> str:
    return f"{hf_repo}@{hf_commit or ''}"
