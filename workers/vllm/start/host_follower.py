"""A follower: the process that runs a part of an engine whose worker is on another host, the head.
It takes no work from the queue, has no worker record, and ends with the head.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from typing import Any

from poc_core.errors import ProoflineError
from poc_core.open_files import raise_file_limit
from poc_core.serving.logs import log_to_stderr
from workers.engines import stages
from workers.engines.options import EngineOptions
from workers.vllm.start import host_link, launch, lifeline, sockets

logger = logging.getLogger(__name__)


def run_follower(options: EngineOptions) -> None:
    """Runs this host's part of the engine until the head ends, then exits the process. After
    SIGTERM, the head first finishes its batches. ProoflineError if loading fails or a rank ends.
    """
    log_to_stderr()
    raise_file_limit()  # the engine's processes inherit the limit
    leaving, serving = threading.Event(), threading.Event()
    connection: host_link.Connection | None = None

    def leave(_signal: int, _frame: Any) -> None:
        leaving.set()
        if connection is not None and serving.is_set():
            with contextlib.suppress(OSError):  # the receiving thread then calls `lost`
                connection.send(leaves=True)  # the head finishes its batches and disconnects
        else:
            os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    connection, words = host_link.join_head(options)

    def hear(message: host_link.Message) -> None:
        if message.get("serves"):
            serving.set()
            logger.info("follower@%s ready.", socket.gethostname())

    def lost(why: str) -> None:
        if not leaving.is_set():
            logger.warning("The head ended: %s. This host waits for it again.", why)
        os._exit(0 if leaving.is_set() else host_link.HOST_LOST_STATUS)

    connection.keep(hear, lost)
    lifeline.offer()
    sockets.Sockets()  # the next start removes the folder, because this process just exits
    stages.begin("importing vLLM")
    launch.follow(options, words)
    raise ProoflineError("A rank of this host's part of the engine ended; its log above says why.")
