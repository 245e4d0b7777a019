"""A worker with access for benchmarks: a bare loop on its engine, and a chat server to switch.

Two engine processes differ in speed for their whole lives, because their pages lie elsewhere in
memory. So the bare loop must run on the same engine as the queue.

This module is also the command of the worker's process, which serves a socket with the methods of
`_Access`.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import JsonValue

from cli.supervise.stack import Stack
from lab.measure.time_parts import TimeParts, time_parts
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.settings import parse_chat_policy
from workers.chat_gate import ChatGate
from workers.engines.base import Engine
from workers.pipeline import compute_all, plan_of
from workers.proofs import Proofs

RUN_TIMEOUT_S = 600.0
LONGEST = 30  # kernels of a micro-batch that are printed
_SOCKET = "PROOFLINE_BENCH_SOCKET"


class OpenWorkerError(ProoflineError):
    """A call of the worker failed, or the worker has ended."""


class OpenStack(Stack):
    """A stack of one worker, whose engine benchmarks may use while nothing is queued."""

    def start(self) -> None:
        self._socket = Path(tempfile.mkdtemp(prefix="open-worker-")) / "socket"
        self.env = {**self.env, _SOCKET: str(self._socket)}
        super().start()

    def stop(self) -> None:
        super().stop()
        self._socket.unlink(missing_ok=True)
        if self._socket.parent.exists():
            self._socket.parent.rmdir()

    def worker_command(self) -> list[str]:
        command = super().worker_command()
        module = [sys.executable, "-P", "-m", "bench.harness.open_worker"]
        return [*module, *command[command.index("supervised-worker") :]]

    def loop(
        self, spec: ProofSpec, nonces: Sequence[int], batch_size: int, max_ms: float | None = None
    ) -> tuple[float, list[JsonValue]]:
        """Computes nonces in the bare loop; returns the seconds, and the values in order.

        `max_ms`: the length of slices, as with chat; None for full micro-batches.
        """
        seconds, values = self._ask("loop", spec, list(nonces), batch_size, max_ms)
        return seconds, values

    def parts(self, spec: ProofSpec, n: int) -> TimeParts | None:
        """Returns the parts of the time of `n` nonces; None if the engine cannot measure them."""
        found: TimeParts | None = self._ask("parts", spec, n)
        return found

    def spent(self) -> list[dict[str, float]]:
        """Returns the parts of each rank's time since the last call (`VllmEngine.spent`)."""
        spent: list[dict[str, float]] = self._ask("spent")
        return spent

    def serve_chat(self, max_step_ms: float) -> int:
        """Starts a chat server with the policy `yield`; returns its port on this host."""
        port: int = self._ask("serve_chat", max_step_ms)
        return port

    def end_chat(self) -> None:
        """Ends the chat server. The worker must have started with POC_CHAT_POLICY=off."""
        self._ask("end_chat")

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            with Client(str(self._socket), "AF_UNIX") as pipe:
                pipe.send((method, args))
                if not pipe.poll(RUN_TIMEOUT_S):
                    raise OpenWorkerError(f"The worker gave no answer within {RUN_TIMEOUT_S:g} s.")
                value, error = pipe.recv()
        except (OSError, EOFError) as gone:
            raise OpenWorkerError(f"The worker is gone ({gone}).") from gone
        if error:
            raise OpenWorkerError(f"{method} failed: {error}")
        return value


class _Access:
    """The methods that a worker's process offers, with access to its engine."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.proofs: Proofs | None = None
        self.chat_server: Any = None

    def offer(self, socket: str) -> None:
        """Serves one connection at a time: (method, arguments) is answered with (value, error)."""
        with Listener(socket, "AF_UNIX") as listener:
            while True:
                with listener.accept() as pipe:
                    method, args = pipe.recv()
                    try:
                        pipe.send((getattr(self, method)(*args), None))
                    except Exception as error:
                        pipe.send((None, repr(error)))

    def loop(
        self, spec: ProofSpec, nonces: Sequence[int], batch_size: int, max_ms: float | None
    ) -> tuple[float, list[JsonValue]]:
        assert self.engine is not None
        values: list[JsonValue] = []
        plan = plan_of(self.engine, max_ms)
        began = time.perf_counter()
        for first in range(0, len(nonces), batch_size):
            values += compute_all(self.engine, spec, nonces[first : first + batch_size], plan)
        return time.perf_counter() - began, values

    def parts(self, spec: ProofSpec, n: int) -> TimeParts | None:
        assert self.engine is not None
        n = min(n, self.engine.info.max_batch(spec.seq_len))
        return time_parts(self.engine.profile(spec, range(n)), n, LONGEST)

    def spent(self) -> list[dict[str, float]]:
        engine: Any = self.engine
        return engine.spent() if hasattr(engine, "spent") else []

    def serve_chat(self, max_step_ms: float) -> int | None:
        assert self.engine is not None
        assert self.proofs is not None
        gate = ChatGate(parse_chat_policy("yield"), self.engine.unfinished_chat)
        port = self.engine.serve_chat(gate, "127.0.0.1")
        self.proofs.admit_chat(gate, max_step_ms)
        return port

    def end_chat(self) -> None:
        assert self.proofs is not None
        self.proofs.admit_chat(None, 0)
        self.chat_server.should_exit = True
        while self.chat_server.started and self.chat_server.servers:
            time.sleep(0.05)


def _main() -> None:
    import uvicorn

    import workers.main
    from cli.main import app

    access = _Access()
    load_engine, start_server = workers.main.load_engine, uvicorn.Server.serve

    def load_and_offer(*args: Any) -> Engine:
        access.engine = load_engine(*args)
        threading.Thread(target=access.offer, args=(os.environ[_SOCKET],), daemon=True).start()
        return access.engine

    def proofs(*args: Any) -> Proofs:
        access.proofs = Proofs(*args)
        return access.proofs

    async def serve(server: uvicorn.Server, *args: Any, **options: Any) -> None:
        access.chat_server = server
        await start_server(server, *args, **options)
        server.servers = []  # all closed

    with (
        patch.object(workers.main, "load_engine", load_and_offer),
        patch.object(workers.main, "Proofs", proofs),
        patch.object(uvicorn.Server, "serve", serve),
    ):
        app(prog_name="proofline")


if __name__ == "__main__":
    _main()
