"""Reports this machine's sensor readings to the node, on a separate thread."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from poc_core.state.deployments import DeploymentStore

# Seconds between two readings, as Prometheus scrapes; temperatures change slowly.
TELL_S = 10.0
_LOOK_S = 1.0  # most seconds to wait for a driver's events before checking for a stop


@dataclass
class MachineReporter:
    """A thread that reports sensors every TELL_S seconds. A hung driver blocks only this thread."""

    store: DeploymentStore
    host_id: str
    host: str
    announce: Callable[[str], None]

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-teller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        from cli.machine.sensors import Sensors  # here: its imports would delay the start

        try:
            with Sensors(self.host) as sensors:
                while not self._stop.is_set():
                    with contextlib.suppress(RedisError):  # the workers log this error
                        self.store.store_machine(self.host_id, sensors.read())
                    until = time.monotonic() + TELL_S
                    while not self._stop.is_set() and (left_s := until - time.monotonic()) > 0:
                        look_s = min(left_s, _LOOK_S)
                        if not sensors.wait_for_events(look_s):
                            self._stop.wait(look_s)
        except Exception as error:  # a bug must not stop the workers
            self.announce(f"the sensors of this machine are no longer reported: {error!r}")
