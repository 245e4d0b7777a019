"""Two real engines under `proofline workers`: chat, a job and a round, while one of the two is lost
in every way.

Under `exclusive`, which without a round is as `yield`.
"""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from cli.supervise.fleet import WORKER_GRACE_S
from cli.supervise.processes import GUARD_MARGIN_S
from poc_core.schemes.artifact.encoding import decode_vector
from tests.harness.chat_client import CHAT, LONG_PROMPT, MODEL, request, streaming
from tests.harness.marks import needs_vllm
from tests.integration.processes import (
    assert_all_gone,
    descendants,
    frozen,
)
from tests.peers.receiver import Receiver
from tests.stacks.round_client import assert_complete, round_body
from tests.stacks.two_workers import TwoWorkers, two_workers

# Two real engines take two minutes of CPU time to start. `make test` holds what they show by
# test_gated_chat.py, test_chat_gate.py and rounds/test_beside_chat.py (exclusive), test_rounds.py
# (two workers in a round, nothing broken off at SIGTERM: test_recovery.py), and test_command.py's
# TestUp (chat under way comes to its end when its worker is to end, on a real engine).
pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.xdist_group("two-workers"),
    needs_vllm,
]

JOB_S = 240.0
ANSWER = 800  # tokens
SALT = "of a request under way"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    with two_workers(tmp_path_factory.mktemp("two-workers")) as both:
        yield both


@pytest.fixture
def client(both: TwoWorkers) -> Iterator[TwoWorkers]:
    """What asks the node of two workers; a round that a failure left is stopped after the test."""
    yield both
    both.stop()


class Job:
    """A job that takes both workers a while."""

    def __init__(self, client: TwoWorkers, n: int = 1000) -> None:
        self._client, self.n = client, n
        body = round_body(None, nonces=list(range(n)), batch_size=8, params={"seq_len": 128})
        answer = client.http.post("/api/v1/pow/generate", json=body)
        assert answer.status_code == 200, answer.text
        self._path = f"/api/v1/pow/generate/{answer.json()['request_id']}"

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.http.get(self._path).json()
        return found

    def wait_middle(self) -> None:
        self._client.wait(lambda: self.state()["n_done"] > 100, JOB_S, "the job's middle")
        assert self.state()["status"] == "running"

    def assert_completes(self) -> None:
        """With every nonce once."""
        self._client.wait(
            lambda: self.state()["status"] not in ("queued", "running"), JOB_S, "the job's end"
        )
        state = self.state()
        assert state["status"] == "completed", state
        assert [artifact["nonce"] for artifact in state["artifacts"]] == list(range(self.n))


def chat(client: TwoWorkers) -> httpx.Response:
    return client.http.post(CHAT, json=request("Hello", 8))


class UnderWay(NamedTuple):
    """A request, on the one of two ready workers that was asked first."""

    worker: dict[str, Any]
    answer: Future[httpx.Response]
    go_on: Callable[[], None]  # the engines stand still until then, so that it is not over before


@contextlib.contextmanager
def under_way_on_the_first(client: TwoWorkers, prompt: str, tokens: int) -> Iterator[UnderWay]:
    """Both engines stand still until the test lets them go on."""
    client.wait_ready()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as standing:
        client.wait(lambda: active(client) == [0, 0], 300, "two idle workers")
        for core in client.cores():
            standing.enter_context(frozen(core.pid))
        answer = pool.submit(client.http.post, CHAT, json=request(prompt, tokens, SALT))
        client.wait(lambda: sorted(active(client)) == [0, 1], 300, "a request on one worker")
        yield UnderWay(client.workers()[active(client).index(1)], answer, standing.close)


def active(client: TwoWorkers) -> list[int]:
    return counted(client, "chat_active")


def counted(client: TwoWorkers, name: str) -> list[int]:
    """What each worker said with its last heartbeat."""
    return [worker["stats"][name] for worker in client.workers()]


def cut_off(client: TwoWorkers) -> list[str]:
    """What the logs say of chat that did not come to its end."""
    return [
        line
        for line in client.lines()
        if re.search("died in the middle|did not answer|are cut off", line)
    ]


def assert_as_of_a_job(client: TwoWorkers, receiver: Receiver) -> None:
    """A round that was stopped: every nonce has arrived, with the vector that a job has for it."""
    client.wait_delivered()
    assert_complete(client, receiver)
    sent = {
        artifact["nonce"]: artifact
        for p in receiver.round_payloads()
        for artifact in p.body["artifacts"]
    }
    nonces = list(sent)[:: max(1, len(sent) // 16)]
    job = client.http.post(
        "/api/v1/pow/generate", json=round_body(None, nonces=nonces, wait=True), timeout=120
    )
    assert job.status_code == 200, job.text
    of_job, of_round = (
        np.stack([decode_vector(artifact["vector_b64"], 12) for artifact in artifacts])
        for artifacts in (job.json()["artifacts"], [sent[nonce] for nonce in nonces])
    )
    assert np.linalg.norm(of_job - of_round, axis=1).max() <= 0.003


def test_exclusive_refuses_chat_during_a_round_and_serves_it_right_after(
    client: TwoWorkers,
) -> None:
    import openai

    assert chat(client).status_code == 200
    client.start(None, params={"seq_len": 256})
    client.wait(lambda: len(client.stats()["workers"]) == 2, 300, "both workers at work")
    refused = chat(client)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "POC_CHAT_POLICY=exclusive" in refused.json()["error"]["message"]
    asking = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError):
        asking.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    before = client.processed()
    client.wait(lambda: client.processed() > before, 300, "progress")
    client.stop()
    client.wait(lambda: chat(client).status_code == 200, 300, "chat after the round")
    client.wait(
        lambda: sum(counted(client, "chat_refused")) >= 2, 300, "the refusals in the status"
    )


def test_a_rounds_start_under_exclusive_aborts_chats_under_way(client: TwoWorkers) -> None:
    """Not drained: what the engines still had of them would hold up the job after the round."""
    with (
        ThreadPoolExecutor(4) as pool,
        contextlib.ExitStack() as standing,
        streaming(client.http, "Hello", ANSWER) as events,
    ):
        next(events)
        for core in client.cores():  # until the round has begun, so that none is over before
            standing.enter_context(frozen(core.pid))
        body = request("Hello", ANSWER)
        whole = [pool.submit(client.http.post, CHAT, json=body, timeout=300) for _ in range(4)]
        client.wait(lambda: sum(active(client)) == 5, 300, "chats under way")
        client.start(None, params={"seq_len": 256})
        *_, last = events
        refused = [one.result() for one in whole]
    assert [one.status_code for one in refused] == [503] * 4
    errors = [json.loads(last)["error"], *(one.json()["error"] for one in refused)]
    assert all("PoC generation is active" in error["message"] for error in errors)
    client.wait(lambda: active(client) == [0, 0], 300, "no chat under way")
    client.stop()
    body = round_body(None, nonces=[0, 1], wait=True)
    answer = client.http.post("/api/v1/pow/generate", json=body, timeout=300)
    assert answer.json()["status"] == "completed"
    client.wait(lambda: chat(client).status_code == 200, 300, "chat after the round")


def test_a_round_of_two_engines_arrives_whole_and_with_a_jobs_values(client: TwoWorkers) -> None:
    with Receiver() as receiver:
        client.start(receiver)
        client.wait(lambda: len(client.stats()["workers"]) == 2, 300, "both workers at work")
        client.wait(lambda: client.processed() >= 32, 300, "a few nonces")
        client.stop()
        assert_as_of_a_job(client, receiver)


def test_streams_of_a_dead_one_end_with_an_error_event_and_others_are_answered_elsewhere(
    client: TwoWorkers,
) -> None:
    short = client.http.post(CHAT, json=request(LONG_PROMPT, 50))
    expected = short.json()["choices"][0]["message"]["content"]
    with under_way_on_the_first(client, LONG_PROMPT, 1400) as (first, answer, go_on):
        go_on()
        with (
            # One of two goes to the second worker: no worker gets more than its share.
            streaming(client.http, "Hello", 1000) as one,
            streaming(client.http, "Hi", 1000) as another,
        ):
            for stream in (one, another):
                next(stream)
            with streaming(client.http, LONG_PROMPT, 1400, SALT) as events:  # where its prefix is
                assert [json.loads(next(events))["object"] for _ in range(3)] == [
                    "chat.completion.chunk"
                ] * 3
                assert not answer.done()
                os.kill(first["pid"], signal.SIGKILL)
                *_, last = events
            assert "was lost" in json.loads(last)["error"]["message"]
            ends = [end for stream in (one, another) for *_, end in [stream]]
            assert "[DONE]" in ends, "the second worker did not go on"
            assert all(end == "[DONE]" or "was lost" in end for end in ends)
            retried = answer.result(300)
            assert retried.status_code == 200
            assert retried.json()["usage"]["completion_tokens"] == 1400
            assert retried.json()["choices"][0]["message"]["content"].startswith(expected)
            # The dead worker is registered for a while still: requests pass it over.
            for _ in range(3):
                assert chat(client).status_code == 200


@pytest.mark.ends_its_stack
def test_sigterm_lets_chat_end_and_drains_and_the_job_completes_after_a_new_start(
    client: TwoWorkers,
) -> None:
    # One that was killed is registered as ready for some seconds more, less than another takes to
    # start.
    client.wait(lambda: len(client.cores()) == 2, 300, "both engines")
    client.wait_ready()
    job, before = Job(client, n=3000), cut_off(client)  # more than both compute while chat begins
    job.wait_middle()
    below = descendants(client.supervisor.pid)
    assert len(client.cores()) == 2
    # The answer takes longer than CHAT_MEMORY_S, and much less than CHAT_GRACE_S.
    n_tokens = 200
    with under_way_on_the_first(client, "Hello", n_tokens) as (_, answer, go_on):
        client.supervisor.terminate()
        client.wait(lambda: "draining" in client.states(), 300, "a worker to say that it is to end")
        assert not answer.done()
        go_on()
        found = answer.result(300)
    assert cut_off(client) == before
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["completion_tokens"] == n_tokens
    assert client.supervisor.wait(WORKER_GRACE_S + GUARD_MARGIN_S) == 0
    assert_all_gone(below)
    state = job.state()
    assert state["status"] == "running"
    assert 0 < state["n_done"] < job.n
    assert state["n_done"] % 8 == 0, "a batch in hand was broken off"
    # The rest needs no real engine here, and another would take a minute to load.
    client.run("--engine", "synthetic", "--synthetic-step-ms", "5")
    job.assert_completes()
