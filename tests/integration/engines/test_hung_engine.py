"""A tensor-parallel engine under more load than it can take, and one whose rank stands still."""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from poc_core.settings import Settings
from tests.harness.chat_client import ConstantChat, vllm_args
from tests.harness.marks import needs_vllm
from tests.harness.waiting import wait_until
from tests.integration.processes import assert_all_gone, command_of, descendants
from tests.stacks.round_client import FAST
from tests.stacks.up import START_TIMEOUT_S, Up
from workers.proofs import ENGINE_LOST_STATUS

pytestmark = [pytest.mark.slow, pytest.mark.integration, needs_vllm, pytest.mark.timeout(1200)]

# The times of production, which `make patience` takes; else shorter ones.
REAL = os.environ.get("PROOFLINE_TIMES") == "real"
HUNG_AFTER_S = Settings().engine_hung_s if REAL else 8.0
# By the default this is the 10 s that an operator has to wait longer.
BESIDE_S = 10.0
STREAMS = 64
SATURATED_S = 600.0 if REAL else 2 * HUNG_AFTER_S
SETTINGS = {} if REAL else {**FAST, "POC_ENGINE_HUNG_S": str(HUNG_AFTER_S)}


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    options = (
        "--model",
        "tiny-qwen3",
        "--dtype",
        "float32",
        "--tensor-parallel",
        "2",
        "--port",
        "0",
    )
    up = Up(*options, "--", *vllm_args(), env=SETTINGS)
    yield up
    up.end()


@pytest.fixture
def http(up: Up) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=up.base_url, timeout=300, limits=limits, trust_env=False) as http:
        yield http


def workers(http: httpx.Client) -> dict[int, str]:
    """The state of each worker that lives, by its pid."""
    return {
        worker["pid"]: worker["state"]
        for worker in http.get("/api/v1/pow/status").json()["workers"]
    }


def health(http: httpx.Client) -> int:
    return http.get("/health").status_code


def test_an_engine_that_is_saturated_is_not_said_to_hang(up: Up, http: httpx.Client) -> None:
    before = workers(http)
    # So many wait for each other for longer than a client would.
    with ConstantChat(http, threads=STREAMS, timeout_s=None, streams=True) as chat:
        end = time.monotonic() + SATURATED_S
        while time.monotonic() < end:
            assert health(http) == 200
            time.sleep(0.5)
    assert (chat.refused, workers(http)) == ([], before)
    print(f"{chat.answered} answers to {STREAMS} clients that stream in {SATURATED_S:g} s")
    assert not [line for line in up.log if "hangs" in line]


@pytest.mark.parametrize(
    "busy",
    [
        pytest.param(True, id="in the middle of chat"),
        pytest.param(False, id="with nothing to do", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still_ends_the_worker_and_another_comes(
    up: Up, http: httpx.Client, busy: bool
) -> None:
    ((pid, state),) = workers(http).items()
    assert (state, health(http)) == ("ready", 200)
    family = descendants(pid)
    rank = next(process for process in family if "Worker_TP1" in command_of(process))
    if busy:
        with ConstantChat(http, threads=2, timeout_s=None):
            wait_until(lambda: chat_active(http), "chat under way", 180)
            stop_and_watch(up, http, rank)
    else:
        stop_and_watch(up, http, rank)
    assert_all_gone([psutil.Process(pid)] if psutil.pid_exists(pid) else [])
    assert_all_gone(family)
    wait_until(lambda: health(http) == 200, "another worker", 2 * START_TIMEOUT_S, 0.2)
    assert pid not in workers(http)


def chat_active(http: httpx.Client) -> int:
    (worker,) = http.get("/api/v1/pow/status").json()["workers"]
    return int(worker["stats"].get("chat_active", 0))


def stop_and_watch(up: Up, http: httpx.Client, rank: psutil.Process) -> None:
    rank.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: health(http) == 503, "503 of /health", HUNG_AFTER_S + BESIDE_S)
    print(f"/health is 503 after {time.monotonic() - began:.1f} s")
    up.wait_line(
        rf"The engine hangs: .* for {HUNG_AFTER_S:g} s .* exits with status {ENGINE_LOST_STATUS}",
        60,
    )
