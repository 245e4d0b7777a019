"""The vLLM engine: an AsyncLLM whose event loop runs in a separate thread. Proofs call methods on
all of vLLM's ranks with `collective_rpc`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import JsonValue

from poc_core import records
from poc_core.errors import ProoflineError
from poc_core.schemes.contract import contract_of
from poc_core.schemes.decode.limits import ChainLimits
from workers.chat_gate import ChatGate
from workers.engines import base, stages
from workers.engines.options import EngineOptions
from workers.engines.validations import Validations
from workers.vllm.forward.recording import SWITCH
from workers.vllm.release.faults import why_unknown
from workers.vllm.start import host_link, launch, lifeline
from workers.vllm.start.sockets import Sockets

T = TypeVar("T")
logger = logging.getLogger(__name__)

# The first batch compiles kernels, which can take minutes.
_WARM_UP_TIMEOUT_S = 600.0
_SHUTDOWN_TIMEOUT_S = 30.0
# Seconds between two probes of an idle engine.
_PROBE_S = 5.0


# A rank's answer, see ProofExtension.
_Answer = dict[str, Any]


class EngineFailedError(ProoflineError):
    """A batch failed inside vLLM, but the engine still works."""


class VllmEngine(base.Engine):
    """A vLLM engine; only one per process, because two would share memory limits."""

    # Seconds that a call may take; the first calls compile kernels.
    rpc_timeout_s: float = _WARM_UP_TIMEOUT_S

    def __init__(self, options: EngineOptions) -> None:
        """Loads the model, which the caller must test (self_tests.py). ProoflineError if vLLM is
        missing, loading fails, or proofs cannot be computed alongside chat.
        """
        self._validation = options.validation
        self._ids_for_all = options.logprob_tokens == "ids"
        self._closed = False
        self._chat: Any = None  # ChatPipeline, once chat is served
        self._steps = self._answers = 0  # steps reported by the engine core; answers of all ranks
        self._calls = 0  # calls to the ranks in progress
        self._stepping: set[int] = set()  # micro-batches that continue with decode steps
        # A slice's seconds on each rank that has reported them so far.
        self._heard: dict[base.Slice, list[float]] = {}
        self._probe: concurrent.futures.Future[int] | None = None
        self._probed_at = 0.0
        self._in_core = 0  # unfinished requests in the engine core at the last probe
        self._seen_steps = 0  # value of _steps at the last pulse
        # Requests that the front end has but not the core, and when that was first seen.
        self._remembered: dict[str, float] = {}
        # Spawn, because a fork would leave this process's threads in an undefined state.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # Cache of compiled grammars: vLLM's 512 MB would fill with clients' grammars. A schema of
        # ten fields takes 0.3 MB with 150,000 tokens, and 30 ms to compile again.
        os.environ.setdefault("VLLM_XGRAMMAR_CACHE_MB", "16")
        os.environ.pop("VLLM_SERVER_DEV_MODE", None)  # would let HTTP run any method
        # A host from which the operator allows pictures must not redirect to another host.
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        lifeline.offer()
        self._sockets = Sockets()
        self._hosts = host_link.Head(options) if options.span is not None else None
        of_hosts = self._hosts.words if self._hosts is not None else ()
        stages.begin("importing vLLM")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-loop", daemon=True
        )
        self._thread.start()
        try:
            try:
                with launch.garbage_may_wait():
                    self._llm, config, self._args = self._await(
                        launch.start(options, self._count_step, of_hosts)
                    )
            except ProoflineError:
                raise
            except Exception as error:  # from any part of vLLM; its log above has details
                said = why_unknown(str(error)) or " ".join(str(error).split())
                raise ProoflineError(
                    f"vLLM cannot start with the model {options.model}: {said}"
                ) from error
            ranks = self._run("configure", options.codebook)
            scheduler = config.scheduler_config
            info = records.ModelInfo(
                name=options.name,
                hidden_size=ranks[0]["hidden_size"],
                n_layers=ranks[0]["n_layers"],
                max_seq_len=config.model_config.max_model_len,
                max_batch_tokens=scheduler.max_num_batched_tokens,
                dtype=ranks[0]["dtype"],
                max_sequences=scheduler.max_num_seqs,
                layers=ranks[0]["layers_path"],
                layers_reflected=ranks[0]["reflected"],
            )
            self.info = ChainLimits(
                codebook=ranks[0]["codebook"],
                kept_block=max(rank["kept_block"] for rank in ranks),
                kept_state=max(rank["kept_state"] for rank in ranks),
                no_chains=next((why for rank in ranks if (why := rank["no_chains"])), ""),
            ).on(info)
            experts = {rank["layers"][0]: rank["moe_layers"] for rank in ranks}
            self._moe_layers = [experts[first] for first in sorted(experts)]  # by stage
            self._decode_memory_gb = options.decode_memory_gb
            self.on_gpu = config.device_config.device_type != "cpu"
            self.slices_in_flight = 2 if self.on_gpu else 1
            self.stages = [range(*own) for own in sorted({tuple(rank["layers"]) for rank in ranks})]
            self.sliceable = all(rank["sliceable"] for rank in ranks)
        except BaseException:
            self.close()
            raise

    def tick(self, tick: base.Tick) -> base.TickResult:
        self._stepping -= set(tick.drop)
        self._stepping |= {
            one.id for one in tick.begin if contract_of(one.spec.scheme).passes(one.spec).steps
        }
        begin = [(one.id, one.spec.model_dump(), list(one.nonces), one.part) for one in tick.begin]
        slices = [list(one) for one in tick.slices]
        args = ("tick", begin, slices, list(tick.drop), tick.wait, tick.fetch)
        try:
            said = self._ask("proof_run", args, self.rpc_timeout_s)
        except base.EngineLostError as error:
            if not (self._stepping and self.on_gpu):
                raise
            raise base.EngineLostError(
                f"{error} Decode proofs were running: if this happens again, try {SWITCH}=off"
                " in the environment of all its hosts."
            ) from error
        try:
            answers = _values(said)
        except (base.EngineMemoryError, EngineFailedError) as error:
            self._heard.clear()
            if any(map(self._hands_over, tick.slices)):
                # The next micro-batch would receive the data that was sent for this one.
                raise base.EngineLostError(
                    f"A pipeline stage failed while another waited for it: {error}."
                ) from error
            if _waits_for_another(said, len(self.stages)):
                # The missing sums would be taken from the next work, including chat.
                raise base.EngineLostError(
                    f"A tensor-parallel rank failed, for whose sums the others wait: {error}."
                    " If it was short of memory, lower --max-num-batched-tokens or"
                    " --gpu-memory-utilization."
                ) from error
            raise
        values: dict[int, Sequence[JsonValue]] = {}
        for answer in answers:
            values |= answer["values"]
            self._stepping -= answer["values"].keys()
            for one, seconds in answer["ran"]:
                self._heard.setdefault(base.Slice(*one), []).append(seconds)
        n_ranks = len(answers) // len(self.stages)  # ranks that run a slice
        ran = [(one, max(heard)) for one, heard in self._heard.items() if len(heard) == n_ranks]
        for one, _ in ran:
            del self._heard[one]
        return base.TickResult(answers[0]["refused"], ran, values)

    def _hands_over(self, one: base.Slice) -> bool:
        """Returns True if this slice's result must be sent to another stage, which waits for it."""
        last = self.stages[-1].stop
        return len(self.stages) > 1 and (
            any(one.end == stage.stop for stage in self.stages[:-1])
            or (one.end == last and one.micro_batch in self._stepping)
        )

    def profile(self, spec: records.ProofSpec, nonces: Sequence[int]) -> list[base.RankProfile]:
        def run(watch: bool) -> list[dict[str, Any]]:
            # One call per run: ranks begin a run when all ranks have ended the previous run.
            return self._run(
                "profile", spec.model_dump(), list(nonces), watch, timeout_s=_WARM_UP_TIMEOUT_S
            )

        runs = [run(watch=False), run(watch=False), run(watch=True)]
        peaks = self._run("matrix_peak", timeout_s=_WARM_UP_TIMEOUT_S)
        found = []
        for *timed, seen, peak in zip(*runs, peaks, strict=True):
            seconds = min(one["seconds"] for one in (*timed, seen))
            kernels = [base.Kernel(*one) for one in seen["kernels"]]
            found.append(
                base.RankProfile(**(seen | peak | {"seconds": seconds, "kernels": kernels}))
            )
        return found

    def watch(self, n_sequences: int, seq_len: int) -> None:
        self._run("watch", n_sequences, seq_len)

    def unwatch(self) -> list[dict[str, Any]]:
        return self._run("unwatch")

    def settle(self, private: bool, replicated: bool) -> None:
        self._run("settle", private, replicated)

    def reserve_for_steps(self) -> int:
        gb, n_places = self._decode_memory_gb, len(self.stages)
        limit = None if gb is None else int(gb * 2**30)
        n_tokens = min(self._run("room_for_steps", n_places, limit))
        if gb is None and not self.on_gpu:  # larger micro-batches gain nothing
            states = self.info.max_sequences * ChainLimits.of(self.info).kept_state
            most = max(self.info.max_batch_tokens, self.info.max_seq_len) + states
            n_tokens = min(n_tokens, most)
        self._run("reserve", n_places, n_tokens, self._moe_layers)
        return int(n_tokens)

    def spent(self) -> list[dict[str, float]]:
        return self._run("spent")

    def use_graphs(self, on: bool) -> dict[str, Any]:
        """Sets whether decode steps replay CUDA graphs. Returns how many graphs are recorded, and
        why recording is impossible (see ProofRunner.use_graphs).
        """
        answers = self._run("use_graphs", on)
        return {
            "recorded": min(one["recorded"] for one in answers),
            "why_not": next((why for one in answers if (why := one["why_not"])), ""),
        }

    def pulse(self) -> base.Pulse:
        """Returns a progress counter, and whether unfinished chat or a probe waits. Probes the
        engine core every few seconds, and at once if chat has made no step since the last call.
        Probes every rank if the core is idle, so that a hang is detected before a client's request.
        Sends no probe during an RPC, which has its own time limit (rpc_timeout_s).
        """
        chat, stood = self.unfinished_chat() > 0, self._steps == self._seen_steps
        self._seen_steps = self._steps
        if self._probe is not None and self._probe.done():
            # An error is an answer too; `check` reports a dead engine.
            failed = self._probe.cancelled() or self._probe.exception() is not None
            self._in_core = int(chat) if failed else self._probe.result()
            self._answers += not self._in_core
            self._probe = None
        now = time.monotonic()
        if (
            not (self._calls or self._closed)
            and self._probe is None
            and (now - self._probed_at > _PROBE_S or (chat and stood))
        ):
            self._probed_at = now
            self._probe = asyncio.run_coroutine_threadsafe(self._ask_core(), self._loop)
        unfinished = chat and self._in_core > 0
        waits = (unfinished or self._probe is not None) and not self._calls
        return base.Pulse(self._steps + self._answers, waits)

    async def _ask_core(self) -> int:
        """Returns the core's number of unfinished requests. If there are none, probes all ranks,
        and aborts requests that the front end has but could not send to the core.
        """
        from workers.vllm.release import engine_core

        llm = self._llm
        n = await engine_core.unfinished_in_core(llm)
        # The core's last outputs are perhaps still unread.
        if n or not llm.engine_core.outputs_queue.empty():
            self._remembered = {}
            return n
        now, states = time.monotonic(), llm.output_processor.request_states
        self._remembered = {one: self._remembered.get(one, now) for one in states}
        lost = [one for one, since in self._remembered.items() if now - since > _PROBE_S]
        if lost:
            logger.warning("dropped %d requests that the engine core does not know", len(lost))
            await llm.abort(lost, internal=True)
        await llm.collective_rpc("proof_ping")
        return 0

    def unfinished_chat(self) -> int:
        llm = self.__dict__.get("_llm")
        return 0 if llm is None else int(llm.output_processor.get_num_unfinished_requests())

    def serve_chat(self, gate: ChatGate, host: str, secret: str | None = None) -> int | None:
        stages.begin("chat server")
        if self.validations is None:
            self.validations = self._score_known_tokens()
        listener = socket.socket()
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        self._args.host, self._args.port = host, port
        with launch.garbage_may_wait():
            self.chat_paths = self._await(
                launch.serve(
                    self._llm, self._args, gate, listener, secret, self._ids_for_all, self._chat
                )
            )
        return port

    def _score_known_tokens(self) -> Validations:
        """Enables the scoring of known tokens. Returns the counters of chat validations."""
        from workers.vllm.chat.pipeline import ChatPipeline
        from workers.vllm.chat.trial import choose_way

        lacks = self._rpc("proof_hook_chat", (), self.rpc_timeout_s)
        self._chat = ChatPipeline(self._llm, next(filter(None, lacks), ""))
        self._chat.install()
        known = self._chat.known
        self._await(choose_way(known, self._llm, self._validation), _WARM_UP_TIMEOUT_S)
        validations: Validations = known.validations
        return validations

    def begin_work(self) -> None:
        if self._hosts is not None:
            self._hosts.serves()

    def check(self) -> None:
        llm = self.__dict__.get("_llm")
        if llm is not None and llm.errored and not self._closed:
            raise base.EngineLostError("The vLLM engine died between two batches.")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        llm = self.__dict__.pop("_llm", None)
        # Runs the steps from the last to the first. A step that fails skips no other step.
        with contextlib.ExitStack() as steps:
            steps.callback(self._sockets.remove)
            steps.callback(self._stop_loop)
            if llm is not None:
                steps.callback(lambda: self._await(launch.shut_down(llm), _SHUTDOWN_TIMEOUT_S))
            if self._chat is not None:
                fair = self._chat.fair
                steps.callback(lambda: self._await(fair.close(), _SHUTDOWN_TIMEOUT_S))
            if self._hosts is not None:
                steps.callback(self._hosts.close)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_SHUTDOWN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return self._rpc("proof_run", (method, *args), timeout_s or self.rpc_timeout_s)

    def _rpc(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        return _values(self._ask(method, args, timeout_s))

    def _ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[_Answer]:
        asked = f"proof_{args[0]}" if method == "proof_run" else method  # as in the docs
        self._calls += 1
        try:
            answers: list[_Answer] = self._await(
                self._llm.collective_rpc(method, args=args), timeout_s
            )
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise base.EngineLostError(
                f"The vLLM engine did not answer {asked} within {timeout_s:g} s."
            ) from error
        except Exception as error:
            if self._llm.errored:
                raise base.EngineLostError(f"The vLLM engine died: {error}") from error
            raise EngineFailedError(f"vLLM could not run {asked}: {error}") from error
        finally:
            self._calls -= 1
        self._answers += 1
        return answers

    def _count_step(self) -> None:
        self._steps += 1

    def _await(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


def _values(answers: Sequence[_Answer]) -> list[Any]:
    """Returns the ranks' results. EngineMemoryError or EngineFailedError if a rank failed."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        is_memory = all(answer["kind"] == "memory" for answer in failed)
        raise (base.EngineMemoryError if is_memory else EngineFailedError)(failed[0]["error"])
    return [answer["value"] for answer in answers]


def _waits_for_another(answers: Sequence[_Answer], n_stages: int) -> bool:
    """Returns True if some ranks of a stage failed, and its other ranks may wait for them."""
    n = len(answers) // n_stages
    failed = ["error" in answer for answer in answers]
    stages = [failed[first : first + n] for first in range(0, len(failed), n)]
    return any(any(stage) and not all(stage) for stage in stages)
