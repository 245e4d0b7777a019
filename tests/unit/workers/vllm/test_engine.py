"""What vLLM is started with and what its ranks tell, as far as it can be seen without it."""

import asyncio
import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.base import EngineLostError, EngineMemoryError, MicroBatch, Pulse, Slice, Tick
from workers.engines.options import EngineOptions
from workers.vllm import engine
from workers.vllm.start import lifeline
from workers.vllm.start.sockets import Sockets


def test_vllms_paths_for_developers_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run any method of the workers for whoever asks."""
    seen: list[str | None] = []

    async def start(*_args: object) -> None:
        seen.append(os.environ.get("VLLM_SERVER_DEV_MODE"))
        raise ProoflineError("This is enough.")

    monkeypatch.setattr(engine.launch, "start", start)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", lifeline.VARIABLE):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # to be as it was after the test
    with pytest.raises(ProoflineError, match="This is enough"):
        engine.VllmEngine(EngineOptions(model="m"))
    assert seen == [None]


# Slices with seconds, or an error of memory.
Told = Sequence[tuple[Slice, float]] | str


class Ranks(engine.VllmEngine):
    """An engine of which only the answers of its ranks are there."""

    def __init__(self, n_stages: int, *answers: Sequence[Told]) -> None:
        """`answers`: of each call, what each rank tells."""
        self.stages = [range(stage, stage + 1) for stage in range(n_stages)]
        self._heard = {}
        self._stepping = set()
        self._waiting = iter(answers)

    def _ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[dict[str, Any]]:
        assert (method, args[0]) == ("proof_run", "tick")
        return [
            {"error": ran, "kind": "memory"}
            if isinstance(ran, str)
            else {"value": {"refused": {}, "ran": ran, "values": {}}}
            for ran in next(self._waiting)
        ]


def test_a_slice_is_told_with_the_time_of_its_slowest_rank_once_that_has_told_it() -> None:
    first, second = Slice(7, 0, 1), Slice(8, 0, 1)
    ranks = Ranks(
        1, [[(first, 1.0)], []], [[(second, 2.0)], [(first, 3.0)]], [[], [(second, 1.0)]], [[], []]
    )
    assert [ranks.tick(Tick()).ran for _ in range(4)] == [[], [(first, 3.0)], [(second, 2.0)], []]


def test_a_slice_of_a_stage_is_told_without_the_other_stages_ranks() -> None:
    first, second = Slice(7, 0, 1), Slice(7, 1, 2)
    ranks = Ranks(2, [[(first, 1.0)], []], [[], [(second, 2.0)]])
    assert [ranks.tick(Tick()).ran for _ in range(2)] == [[(first, 1.0)], [(second, 2.0)]]


def test_memory_that_is_short_on_all_ranks_of_a_stage_loses_no_engine() -> None:
    short = "out of memory"
    cases: list[tuple[int, list[Told]]] = [(1, [short, short]), (2, [short, short, [], []])]
    for n_stages, answers in cases:
        with pytest.raises(EngineMemoryError, match=short):
            Ranks(n_stages, answers).tick(Tick())


def test_ranks_of_which_one_failed_are_lost() -> None:
    """The others wait for its sums, and would take them from whatever it computes next."""
    short = "out of memory"
    cases: list[tuple[int, list[Told]]] = [
        (1, [[], short]),
        (2, [short, [], [], []]),
        (2, [[], [], [], short]),
    ]
    for n_stages, answers in cases:
        with pytest.raises(EngineLostError, match=r"others wait: out of memory\. If it was short"):
            Ranks(n_stages, answers).tick(Tick())


@pytest.mark.parametrize("scheme", ["decode", "artifact"])
def test_an_engine_lost_under_decode_proofs_says_what_to_try(scheme: str) -> None:
    class Lost(Ranks):
        on_gpu = True

        def _ask(self, *_args: Any) -> Any:
            raise EngineLostError("No answer.")

    options: dict[str, JsonValue] = {"max_tokens": 4} if scheme == "decode" else {}
    spec = ProofSpec(scheme=scheme, block_hash="b", public_key="k", seq_len=4, options=options)
    with pytest.raises(EngineLostError) as lost:
        Lost(1).tick(Tick([MicroBatch(spec, range(1), id=0)]))
    assert str(lost.value).startswith("No answer.")
    assert ("PROOFLINE_GRAPHS=off" in str(lost.value)) == (scheme == "decode")


class Served(engine.VllmEngine):
    """An engine that serves chat, of which only the end is there."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        self._closed, self._hosts = False, None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._llm = SimpleNamespace()
        self._chat = SimpleNamespace(fair=SimpleNamespace(close=self._fails))
        self._sockets = cast(Sockets, SimpleNamespace(remove=lambda: ended.append("sockets")))

    async def _fails(self) -> None:
        self._ended.append("grammars")
        raise RuntimeError("another coroutine reads")


def test_an_end_of_chat_that_fails_skips_no_other_step_of_an_engines_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def shut_down(_llm: object) -> None:
        ended.append("vLLM")

    monkeypatch.setattr(engine.launch, "shut_down", shut_down)
    served = Served(ended)
    with pytest.raises(RuntimeError, match="another coroutine"):
        served.close()
    assert ended == ["grammars", "vLLM", "sockets"]
    assert vars(served)["_loop"].is_closed()


class Core:
    """What an engine asks of its core: how many requests that has not finished."""

    def __init__(self) -> None:
        self.unfinished = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.core_engines = ["0"]
        self.outputs_queue: asyncio.Queue[None] = asyncio.Queue()

    async def _call_utility_async(self, method: str, engine: str) -> int:
        assert (method, engine) == ("proof_unfinished", "0")
        await self.answers.wait()
        return self.unfinished


class Front(engine.VllmEngine):
    """An engine whose front remembers requests; nothing is computed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._closed, self._probe, self._probed_at = False, None, 0.0
        self._steps = self._answers = self._calls = self._in_core = self._seen_steps = 0
        self._remembered = {}
        self.core = Core()
        self.states: dict[str, None] = {}
        self.dropped: list[str] = []
        front = {"request_states": self.states, "get_num_unfinished_requests": self.states.__len__}
        self._llm = SimpleNamespace(
            engine_core=self.core,
            output_processor=SimpleNamespace(**front),
            collective_rpc=self.ping,
            abort=self.abort,
        )

    def steps(self) -> None:
        self._count_step()

    async def ping(self, _method: str) -> None:
        pass

    async def abort(self, ids: Sequence[str], internal: bool) -> None:
        assert internal
        self.dropped += ids
        for one in ids:
            del self.states[one]

    async def looks(self, n: int = 3) -> list[Pulse]:
        """Pulses between which the core has time to answer."""
        found = []
        for _ in range(n):
            found.append(self.pulse())
            for _ in range(10):
                await asyncio.sleep(0)
        return found

    async def stays_still(self) -> bool:
        """Whether its watchdog would count all time from the second look on."""
        await self.looks(2)
        found = await self.looks()
        return all(one.waits for one in found) and len({one.beats for one in found}) == 1


@pytest.fixture
async def front() -> Front:
    pytest.importorskip("workers.vllm.release.api_server")
    return Front(asyncio.get_running_loop())


@pytest.mark.xdist_group("engines")
class TestHung:
    async def test_a_core_with_unfinished_requests_and_no_steps_is(self, front: Front) -> None:
        front.states["a"] = None
        front.core.unfinished = 1
        assert await front.stays_still()

    async def test_a_step_is_a_beat(self, front: Front) -> None:
        front.states["a"] = None
        front.core.unfinished = 1
        before = front.pulse().beats
        front.steps()
        assert front.pulse().beats == before + 1

    async def test_a_core_that_does_not_answer_is(self, front: Front) -> None:
        front.states["a"] = None
        front.core.answers.clear()
        assert await front.stays_still()

    async def test_one_with_requests_that_the_front_alone_remembers_is_not(
        self, front: Front
    ) -> None:
        front.states["never sent"] = None
        assert not await front.stays_still()

    async def test_such_requests_are_dropped_and_none_that_has_just_come(
        self, front: Front, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        front.states["never sent"] = None
        await front.looks()
        assert front.dropped == []
        monkeypatch.setattr(engine, "_PROBE_S", 0.0)
        front.states["on its way"] = None
        await front.looks(1)
        assert front.dropped == ["never sent"]
        assert list(front.states) == ["on its way"]

    async def test_what_waits_to_be_read_from_the_core_is_kept(
        self, front: Front, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "_PROBE_S", 0.0)
        front.states["answered"] = None
        front.core.outputs_queue.put_nowait(None)
        await front.looks()
        assert front.dropped == []
