"""Starts processes that download models (download.py), and replaces processes that died."""

import logging
import os
import socket
import subprocess
import sys
import threading

from poc_core.periodic import Periodic
from poc_core.settings import Settings
from poc_core.state import downloads

logger = logging.getLogger(__name__)

# Seconds between two checks of the download processes.
LOOK_S = 5.0
# Looks at a download of another machine without a process after which this machine continues it: a
# container that was created again is another machine, and a machine may restart meanwhile.
_LEFT_LOOKS = 60


class Downloads:
    """Manages the processes that download models into this machine's cache."""

    def __init__(self, store: downloads.DownloadStore, settings: Settings) -> None:
        self.store = store
        self.machine = socket.gethostname()
        self._redis_url = settings.redis_url
        # guards _processes: requests start downloads while `tend` runs
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by task_id
        self._left: dict[str, int] = {}  # looks at other machines' downloads, by task_id

    def looks(self) -> Periodic:
        return Periodic("downloads", LOOK_S, self.tend)

    def begin(self, download: downloads.Download) -> None:
        """Starts the process of a download that this API claimed, unless it already runs."""
        command = [sys.executable, "-m", "api.models.download", download.name, download.task_id]
        # The URL may contain a password: the environment is private, a command line is not.
        environment = {**os.environ, "POC_REDIS_URL": self._redis_url}
        with self._lock:
            if download.task_id not in self._processes:
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
                self._processes[download.task_id] = process

    def tend(self) -> None:
        """Starts new processes for this machine's downloads whose process has died, and for those
        of a machine that has not done so for _LEFT_LOOKS looks.
        """
        with self._lock:
            ended = [task_id for task_id, one in self._processes.items() if one.poll() is not None]
            for task_id in ended:
                del self._processes[task_id]
        for task_id in ended:
            self.store.leave(task_id)  # a killed process could not report its end
        running, left = self.store.running(), self._left
        ours = {one.task_id for one in running if one.machine == self.machine}
        self._left = {
            one.task_id: left.get(one.task_id, 0) + 1
            for one in running
            if one.task_id not in ours and not self.store.is_alive(one)
        }
        ours |= {task_id for task_id, looks in self._left.items() if looks >= _LEFT_LOOKS}
        for download in running:
            if download.task_id in ours and self.store.claim(download):
                logger.info("the download of %s goes on", download.name)
                self.begin(download)

    def processes(self) -> list[subprocess.Popen[bytes]]:
        with self._lock:
            return [process for process in self._processes.values() if process.poll() is None]

    def close(self) -> None:
        """Ends the download processes. The next API process continues their downloads."""
        processes = self.processes()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(downloads.ALIVE_S)
