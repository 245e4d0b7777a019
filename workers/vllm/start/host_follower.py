"""A follower: the process on a host that runs a part of an engine whose worker is on another host,
the head. A follower takes no work from the queue, and has no worker record. It computes for the
head's engine and ends with the head. A supervisor then restarts the follower.
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
    """Runs this host's part of the engine until the head ends. After SIGTERM, the head first
    finishes its batches. Exits the process instead of returning. ProoflineError if this host's part
    of the engine cannot be loaded, or if one of its ranks ends.
    """
    log_to_stderr()
    raise_file_limit()  # the engine's processes inherit the limit
    leaving, serving = threading.Event(), threading.Event()
    connection: host_link.Connection | None = None

    def leave(_signal: int, _frame: Any) -> None:
        leaving.set()
        if connection is not None and serving.is_set():
            with contextlib.suppress(OSError):  # `lost` is called
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
