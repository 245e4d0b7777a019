"""How `make faults` judges a stack's artifacts."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import fakeredis
import httpx
import pytest
from pydantic import JsonValue

from bench.faults.campaign import Report
from bench.faults.inside import Inside
from bench.faults.reference import Reference
from bench.faults.usage import Usage, Use
from bench.faults.work import ROUND_NONCES, ROUND_NONCES_AGAIN, Artifacts, Work
from bench.harness.computed import Computed
from poc_core.records import ModelInfo, ProofSpec
from tests.peers.receiver import Payload, Receiver
from workers.engines.base import EngineLostError, WholeBatchEngine


class Engine(WholeBatchEngine):
    """Says which nonces it computed, and whether two threads had it compute at once."""

    info = ModelInfo(
        name="m", hidden_size=8, n_layers=1, max_seq_len=64, max_batch_tokens=2**20, dtype="float32"
    )

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.computed: list[int] = []
        self.is_closed = False

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        assert self.busy.acquire(blocking=False), "two threads in one engine"
        time.sleep(0.001)
        self.computed += nonces
        self.busy.release()
        if spec.block_hash == "bad":
            raise EngineLostError("It is lost.")
        return [f"{spec.block_hash} {nonce}" for nonce in nonces]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engines() -> list[Engine]:
    return []


@pytest.fixture
def reference(engines: list[Engine]) -> Iterator[Reference]:
    def load() -> Engine:
        engines.append(Engine())
        return engines[-1]

    with Reference(load, 3) as reference:
        yield reference
    assert all(engine.is_closed for engine in engines)


def test_the_artifacts_of_many_threads_are_each_nonces_own(
    reference: Reference, engines: list[Engine]
) -> None:
    found: dict[str, list[dict[str, object]]] = {}

    def ask(block: str) -> None:
        found[block] = reference.artifacts(block, range(200, 0, -1))

    threads = [threading.Thread(target=ask, args=(f"block-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in ("block-0", "block-1", "block-2", "block-3"):
        assert found[block] == [
            {"nonce": n, "vector_b64": f"{block} {n}"} for n in range(200, 0, -1)
        ]
    assert Counter(n for engine in engines for n in engine.computed) == dict.fromkeys(
        range(1, 201), 4
    )


def right(block_hash: str, nonces: Sequence[int]) -> Artifacts:
    return [{"nonce": nonce, "vector_b64": f"{block_hash} {nonce}"} for nonce in nonces]


class Seen(Inside):
    def __init__(self, computed: Computed) -> None:
        super().__init__(fakeredis.FakeRedis(), "m")
        self._computed = computed

    def last_round(self) -> Computed:
        return self._computed


def checked(artifacts: Artifacts, most_seconds: float = 60.0, n_processed: int = 2000) -> Work:
    """What a campaign finds whose one round sent these artifacts."""
    work = worked(artifacts, n_processed)
    work.check_rounds(most_seconds)
    return work


def worked(artifacts: Artifacts, n_processed: int = 2000) -> Work:
    """Work whose one round sent these artifacts."""
    halves = artifacts[:900], artifacts[900:]
    receiver = Receiver()
    for number, half in enumerate(halves):
        body = {"payload_id": f"r-{number}", "block_hash": "block", "artifacts": half}
        receiver.payloads.append(Payload(0.0, "/generated", body, 200))
    return Work(
        httpx.Client,
        receiver,
        right,
        lambda some, others: some == others,
        1,
        chat=False,
        size=1,
        inside=Seen(Computed("r", n_processed, {5})),
    )


def test_a_round_that_is_whole_and_right_has_no_problem() -> None:
    work = checked(right("block", [nonce for nonce in range(2001) if nonce != 5]))
    assert work.problems == []
    assert work.counts == {ROUND_NONCES: 2000, ROUND_NONCES_AGAIN: 2000}


def test_one_wrong_value_of_a_round_is_found() -> None:
    artifacts = right("block", [nonce for nonce in range(2001) if nonce != 5])
    artifacts[1234]["vector_b64"] = "block 7"
    assert checked(artifacts).problems == ["round r: wrong artifacts"]


@pytest.mark.parametrize(
    ("nonces", "problem"),
    [
        ([*range(700), *range(701, 2002)], "round r: missing [5, 700], repeated []"),
        ([*range(2001), 3], "round r: missing [5], repeated [3]"),
    ],
)
def test_what_is_missing_or_came_twice_is_found_without_time_for_values(
    nonces: list[int], problem: str
) -> None:
    came = right("block", [nonce for nonce in nonces if nonce != 5])
    work = checked(came, most_seconds=-1)
    assert work.problems == [problem]
    assert (work.counts[ROUND_NONCES], work.counts[ROUND_NONCES_AGAIN]) == (len(came), 0)
    assert (
        "not all nonces of the rounds were computed again" in Report(1, counts=work.counts).text()
    )


def test_a_round_whose_record_counts_other_nonces_is_found() -> None:
    work = checked(right("block", range(2000)), n_processed=2000)
    assert work.problems == ["round r: 1999 nonces came, it counts 2000"]  # 5 is nobody's


MIB = 2**20


@pytest.mark.parametrize(
    ("at_the_end", "grew"),
    [
        (Use(1, "api", 149 * MIB, 65), []),
        (Use(1, "api", 151 * MIB, 65), ["memory of api grew from 100 to 151 MiB"]),
        (Use(1, "api", 149 * MIB, 66), ["descriptors of api grew from 30 to 66"]),
    ],
)
def test_what_grows_is_found_also_of_a_process_that_was_started_meanwhile(
    at_the_end: Use, grew: list[str]
) -> None:
    looks = iter(
        [[], [Use(1, "api", 9 * MIB, 3)], [Use(1, "api", 100 * MIB, 30)], [at_the_end], []]
    )
    seconds = iter([0.0, 50.0, 60.0, 70.0, 80.0])
    usage = Usage(
        lambda: next(looks), 10, free_mib=40, free_descriptors=20, clock=lambda: next(seconds)
    )
    for _ in range(5):
        usage.look()
    assert usage.growth() == grew
    (line,) = usage.text()
    assert line.startswith(
        f"api: {at_the_end.rss // MIB} MiB and {at_the_end.descriptors} descriptors"
    )
