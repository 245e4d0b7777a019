"""The process that downloads one model: `python -m api.models.download NAME`. It ends when
nobody wants the model any more, and says in Redis that it lives, so that another is started
when it dies; what it had is not downloaded again.
"""

import logging
import os
import sys
import threading
import time

from redis.exceptions import RedisError

from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.downloads import ALIVE_S, Download, DownloadStore

logger = logging.getLogger(__name__)

# Seconds for which Redis may be away: the stack that it belonged to may have ended.
_PATIENCE_S = 60.0


def main(name: str) -> None:
    settings = load_settings()
    store = DownloadStore(connect(settings))
    download = store.by_name(name)
    if download is None or download.state != "running" or not store.claim(download):
        return
    threading.Thread(target=_live, args=(store, download), daemon=True).start()
    error = fetch(download)
    store.end(download, error)
    store.leave(download)


def fetch(download: Download) -> str | None:
    """Why it failed; None: it is there."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(download.hf_repo, revision=download.hf_commit)
    except Exception as error:  # the hub's, the network's, the disk's
        logger.warning("%s could not be downloaded: %s", download.name, error)
        return f"{type(error).__name__}: {error}"[:1000]
    return None


def _live(store: DownloadStore, download: Download) -> None:
    answered_at = time.monotonic()
    while True:
        time.sleep(ALIVE_S / 5)
        try:
            wanted = store.renew(download)
            answered_at = time.monotonic()
        except RedisError:
            wanted = time.monotonic() - answered_at < _PATIENCE_S
        if not wanted:
            os._exit(0)  # from within whatever it downloads


if __name__ == "__main__":
    main(sys.argv[1])
