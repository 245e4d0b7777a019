"""A worker for benchmarks to reach into: a bare loop on its engine, and a chat server to switch.

The very same engine, not another of its kind: two engine processes started alike differ in speed
for as long as they live, by where in memory their pages happen to lie.

As a module this is the command of a supervised worker, with loop and switch on offer to whoever
opens its socket.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from pydantic import JsonValue

from bench import decode_speed as bench
from cli.supervise.stack import Stack
from lab.measure.time_parts import TimeParts, time_parts
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.schemes.decode.contract import CONTRACT
from poc_core.settings import parse_chat_policy
from workers.chat_gate import ChatGate
from workers.engines.base import Engine
from workers.pipeline import compute_all, plan_of
from workers.proofs import Proofs

RUN_TIMEOUT_S = 600.0
LONGEST = 30  # kernels of a micro-batch that are told
CHAIN_TURNS = 2
CHAT_POLICY_HELP = (
    "POC_CHAT_POLICY of the worker. Any but off adds what chat costs: slices of at most"
    " POC_MAX_STEP_MS, which the bare loop does not make."
)
_SOCKET = "PROOFLINE_BENCH_SOCKET"


class OpenWorkerError(ProoflineError):
    """What was asked of the worker failed, or the worker is gone."""


class Chains(NamedTuple):
    """Decode proofs beside vLLM's own generation of as many tokens, in turns."""

    seconds: list[float]
    own_seconds: list[float]
    differing_tokens: float  # of a step of vLLM's own
    why_no_graphs: str  # empty: steps are recorded


class OpenStack(Stack):
    """A stack of one worker that can be reached into while nothing is queued."""

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
        return [
            sys.executable,
            "-P",
            "-m",
            "bench.harness.open_worker",
            *command[command.index("supervised-worker") :],
        ]

    def loop(
        self,
        spec: ProofSpec,
        nonces: Sequence[int],
        batch_size: int,
        max_step_ms: float | None = None,
    ) -> tuple[float, list[JsonValue]]:
        """Seconds that the loop took, and the values by nonce, in order.

        `max_step_ms`: in slices of that length, as beside chat; None: not cut.
        """
        answer: tuple[float, list[JsonValue]] = self._ask(
            "loop", spec, list(nonces), batch_size, max_step_ms
        )
        return answer

    def parts(self, spec: ProofSpec, n: int) -> TimeParts | None:
        """Where the time of a micro-batch of `n` nonces goes; None: the engine cannot tell."""
        found: TimeParts | None = self._ask("parts", spec, n)
        return found

    def spent(self) -> list[dict[str, float]]:
        """Where each rank's time went since the last call, see VllmEngine.spent."""
        spent: list[dict[str, float]] = self._ask("spent")
        return spent

    def chains(self, seq_len: int, max_tokens: int, n: int) -> Chains:
        """Chains of `n` nonces at a time, each of so many positions and then steps."""
        return Chains(*self._ask("chains", seq_len, max_tokens, n))

    def serve_chat(self, max_step_ms: float) -> int:
        """Starts a chat server and its gate as for `yield`; returns the port on this host."""
        port: int = self._ask("serve_chat", max_step_ms)
        return port

    def end_chat(self) -> None:
        """Ends chat server and gate, as POC_CHAT_POLICY=off, with which the worker must start."""
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
    """A worker's parts in its process, and what is done with them."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.proofs: Proofs | None = None
        self.chat_server: Any = None

    def offer(self, socket: str) -> None:
        """Answers (method, arguments) with (value, error), one connection after the other."""
        with Listener(socket, "AF_UNIX") as listener:
            while True:
                with listener.accept() as pipe:
                    method, args = pipe.recv()
                    try:
                        pipe.send((getattr(self, method)(*args), None))
                    except Exception as error:
                        pipe.send((None, repr(error)))

    def loop(
        self,
        spec: ProofSpec,
        nonces: Sequence[int],
        batch_size: int,
        max_step_ms: float | None,
    ) -> tuple[float, list[JsonValue]]:
        assert self.engine is not None
        values: list[JsonValue] = []
        plan = plan_of(self.engine, max_step_ms)
        began = time.perf_counter()
        for first in range(0, len(nonces), batch_size):
            values += compute_all(self.engine, spec, nonces[first : first + batch_size], plan)
        return time.perf_counter() - began, values

    def parts(self, spec: ProofSpec, n: int) -> TimeParts | None:
        assert self.engine is not None
        return time_parts(self.engine.profile(spec, range(n)), n, LONGEST)

    def spent(self) -> list[dict[str, float]]:
        engine: Any = self.engine
        return engine.spent() if hasattr(engine, "spent") else []

    def chains(
        self, seq_len: int, max_tokens: int, n: int
    ) -> tuple[list[float], list[float], float, str]:
        """See Chains, which is another class there: this module is its process's main one."""
        engine: Any = self.engine
        room = CONTRACT.max_batch(bench.spec_of(seq_len, max_tokens, ""), engine.info)
        if n > room:
            raise OpenWorkerError(f"{n} nonces have no room ({room} have); see --decode-memory-gb.")
        engine.use_graphs(True)
        bench.chains(engine, seq_len, bench.WARM_STEPS, n, "warm-up")
        prompts = bench.random_prompts(engine, seq_len, n)
        bench.generate(engine, prompts, bench.WARM_STEPS)
        seconds, own = [], []
        for index in range(CHAIN_TURNS):
            ours = partial(bench.chains, engine, seq_len, max_tokens, n, f"turn-{index}")
            seconds.append(bench.timed(ours))
            own.append(bench.generate(engine, prompts, max_tokens))
        return (
            seconds,
            [one.seconds for one in own],
            own[-1].differing_tokens,
            engine.use_graphs(True)["why_not"],
        )

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
