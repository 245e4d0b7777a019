"""Starts the processes that download models, and starts those again that died (see
download.py).
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys

from anyio import to_thread
from redis.exceptions import RedisError

from poc_core.settings import Settings
from poc_core.state.downloads import ALIVE_S, Download, DownloadStore

logger = logging.getLogger(__name__)

# Seconds between two looks whether a download's process lives.
_LOOK_S = 5.0


class Downloads:
    """Those whose models go to this machine's cache."""

    def __init__(self, store: DownloadStore, settings: Settings) -> None:
        self.store = store
        self.machine = socket.gethostname()
        self._redis_url = settings.redis_url
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by task_id

    def begin(self, download: Download) -> None:
        """Starts a process, which does nothing when another has the download."""
        command = [sys.executable, "-m", "api.models.download", download.name]
        # The url may hold a password: the environment is private, a command line is not.
        process = subprocess.Popen(command, env=_environment(self._redis_url), stdin=subprocess.DEVNULL)
        self._processes[download.task_id] = process

    def tend(self) -> None:
        """Starts again what runs by its record and has no process: it died, maybe with this
        API's predecessor.
        """
        running = [one for one in self.store.running() if one.machine == self.machine]
        for task_id in [task_id for task_id, process in self._processes.items() if process.poll() is not None]:
            del self._processes[task_id]
        for download in running:
            if download.task_id not in self._processes and not self.store.is_alive(download):
                logger.info("the download of %s goes on", download.name)
                self.begin(download)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Those that this API started and that run."""
        return [process for process in self._processes.values() if process.poll() is None]

    async def run(self) -> None:
        """For the life of the API."""
        while True:
            try:
                await to_thread.run_sync(self.tend)
            except RedisError as error:
                logger.debug("could not look for downloads: %s", error)
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """With the API that ends in order nothing is left running; its successor goes on."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(ALIVE_S)


def _environment(redis_url: str) -> dict[str, str]:
    return {**os.environ, "POC_REDIS_URL": redis_url}
