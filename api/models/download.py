"""The process that downloads one model: `python -m api.models.download NAME TASK_ID`.

It ends when nobody wants the model any more, and says in Redis that it lives: when it dies another
is started, which keeps what was downloaded.
"""

import logging
import os
import sys
import time
from contextlib import suppress

from redis.exceptions import RedisError

from poc_core.periodic import Periodic
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.downloads import ALIVE_S, Download, DownloadStore

logger = logging.getLogger(__name__)

# Seconds for which Redis may be away: the process's stack may have ended.
_PATIENCE_S = 60.0


def main(name: str, task_id: str) -> None:
    store = DownloadStore(connect(load_settings()))
    download = store.by_name(name)
    if download is not None and download.task_id == task_id and store.renew(download):
        life = Periodic("life of the download", ALIVE_S / 5, _Life(store, download).go_on)
        life.start()
        error = fetch(download)
        life.stop()
        store.end(download, error)
    store.leave(task_id)


def fetch(download: Download) -> str | None:
    """Downloads the model; why that failed, or None."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(download.hf_repo, revision=download.hf_commit)
    except Exception as error:  # the hub's, the network's, the disk's
        logger.warning("%s could not be downloaded: %s", download.name, error)
        return f"{type(error).__name__}: {error}"[:1000]
    return None


class _Life:
    """Says in Redis that the process lives, and ends it where it is not wanted."""

    def __init__(self, store: DownloadStore, download: Download) -> None:
        self._store = store
        self._download = download
        self._answered_at = time.monotonic()

    def go_on(self) -> None:
        try:
            wanted = self._store.renew(self._download)
            self._answered_at = time.monotonic()
        except RedisError:
            wanted = time.monotonic() - self._answered_at < _PATIENCE_S
        if not wanted:
            with suppress(RedisError):
                self._store.leave(self._download.task_id)
            os._exit(0)  # from within whatever it downloads


if __name__ == "__main__":
    main(*sys.argv[1:])
