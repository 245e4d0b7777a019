"""A host serves the deployed model; a withdrawn or failed deployment ends."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from cli.shipped import shipped_models
from cli.supervise.fleet import Fleet
from cli.terminal import UsageError
from poc_core.serving.deployments import KEPT_S, Deployment, DeploymentState, HostState
from poc_core.state import keys
from tests.peers.hosts import LLAMA, OWN, Node

QWEN3 = Deployment(model="tiny-qwen3")


def test_a_host_without_a_model_waits_for_one_and_serves_it(node: Node) -> None:
    h = node.host()
    assert (h.look().state, h.follower.waits, h.fleets) == (HostState.IDLE, True, [])
    node.store.deploy(LLAMA)
    report = h.look()
    assert (report.state, report.model, report.generation) == (HostState.STARTING, "tiny-llama", 1)
    assert h.fleet.options.model == str(shipped_models()["tiny-llama"])
    assert (h.serve().state, node.store.status().state) == (
        HostState.SERVING,
        DeploymentState.RUNNING,
    )
    assert not h.follower.waits


def test_another_model_is_started_when_the_last_worker_of_the_first_is_gone(node: Node) -> None:
    h = node.asked_for_llama()
    h.serve()
    node.store.withdraw()
    node.store.deploy(QWEN3)
    assert (h.look().state, h.fleet.n_stops, len(h.fleets)) == (HostState.STOPPING, 1, 1)
    assert (h.look().state, len(h.fleets), h.fleet.options.name) == (
        HostState.STARTING,
        2,
        "tiny-qwen3",
    )
    assert h.serve().state is HostState.SERVING
    assert [fleet.n_stops for fleet in h.fleets] == [1, 0]


def test_the_same_model_deployed_again_is_started_again(node: Node) -> None:
    h = node.host()
    h.look()
    for _ in range(2):
        node.store.deploy(LLAMA)
        h.look(2)
        h.serve()
        node.store.withdraw()
    assert len(h.fleets) == 2


def test_after_a_withdrawal_nothing_runs(node: Node) -> None:
    h = node.host(OWN)
    assert h.look().state is HostState.STARTING
    h.serve()
    node.store.withdraw()
    assert h.look().state is HostState.STOPPING
    assert not node.store.status().is_gone
    assert h.look().state is HostState.IDLE
    assert node.store.status().is_gone
    assert h.follower.waits


def test_a_load_that_is_stopped_goes_on_when_the_very_same_is_deployed(node: Node) -> None:
    h = node.stopped_while_it_loads()
    for _ in range(2):
        node.store.deploy(LLAMA)
        assert h.look(2).state is HostState.STARTING
        node.store.withdraw(keeps=True)
        assert h.look(2).state is HostState.KEEPING
    node.store.deploy(LLAMA)
    report = h.serve()
    assert (report.state, report.generation) == (HostState.SERVING, 7)
    assert node.store.status().state is DeploymentState.RUNNING
    assert (len(h.fleets), h.fleet.n_stops) == (1, 0)
    node.store.withdraw(keeps=True)  # now it serves
    assert h.look(2).state is HostState.IDLE
    assert h.fleet.n_stops == 1


def test_a_host_that_failed_begins_again_though_the_same_is_deployed_within_a_look(
    node: Node,
) -> None:
    loads = node.asked_for_llama()
    fails = node.host(name="h2")
    fails.look()
    fails.fleet.why = "no memory"
    assert fails.look().state is HostState.FAILED
    node.store.withdraw(keeps=True)
    node.store.deploy(LLAMA)
    assert fails.look(2).state is HostState.STARTING
    assert [one.n_stops for one in fails.fleets] == [1, 0]
    assert loads.look(2).state is HostState.STARTING
    assert [one.n_stops for one in loads.fleets] == [0]


def test_what_gets_ready_meanwhile_serves_at_once(node: Node) -> None:
    h = node.stopped_while_it_loads()
    assert h.serve().state is HostState.KEEPING
    assert node.store.keeping() == {h.follower.id}  # whose workers get no chat
    node.store.deploy(LLAMA)
    assert node.store.keeping() == set()
    assert h.look().state is HostState.SERVING
    assert (len(h.fleets), h.fleet.n_stops) == (1, 0)


@pytest.mark.parametrize("why", ["another", "time", "down", "failed"])
def test_a_load_that_was_stopped_ends_for_another_model_or_in_time(
    node: Node, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    h = node.stopped_while_it_loads()
    if why == "another":
        node.store.deploy(QWEN3)
    elif why == "time":
        later = time.monotonic() + KEPT_S + 1
        monkeypatch.setattr("cli.supervise.follower.time.monotonic", lambda: later)
    elif why == "down":
        node.store.withdraw()
    else:
        h.fleet.why = "no such model"
    report = h.look(3)
    assert h.fleets[0].n_stops == 1
    wanted = HostState.STARTING if why == "another" else HostState.IDLE
    assert report.state is wanted
    node.store.withdraw()
    node.store.deploy(LLAMA)
    assert h.look(2).state is HostState.STARTING
    assert h.fleet.options.name == "tiny-llama"
    assert len(h.fleets) == (3 if why == "another" else 2)


def test_a_load_of_the_commands_own_model_is_not_kept(node: Node) -> None:
    h = node.host(OWN)
    assert h.look().state is HostState.STARTING
    node.store.withdraw(keeps=True)
    assert h.look(2).state is HostState.IDLE
    assert h.fleet.n_stops == 1


def test_a_worker_that_restarts_does_not_take_the_model_back(node: Node) -> None:
    h = node.asked_for_llama()
    h.serve()
    h.fleet.is_serving = False
    assert h.look().state is HostState.SERVING
    assert node.store.status().state is DeploymentState.RUNNING


def test_a_model_that_cannot_be_served_fails_and_the_host_waits_for_another(node: Node) -> None:
    h = node.asked_for_llama()
    h.fleet.why = (
        "h1/cpu0 ended (exit code 1); not restarted: 2 times in a row. error: no such model"
    )
    report = h.look()
    assert (report.state, report.error) == (HostState.FAILED, h.fleet.why)
    record = node.record()
    assert record.error == h.fleet.why
    assert h.follower.failure() is None  # the command goes on
    assert h.look(2).state is HostState.IDLE
    assert h.said[-1] == f"tiny-llama cannot be served: {h.fleet.why}"
    node.store.deploy(QWEN3)
    assert (h.look().state, h.fleet.options.name) == (HostState.STARTING, "tiny-qwen3")


def test_a_model_that_is_none_or_has_no_place_here_fails_at_once(node: Node) -> None:
    h = node.host()
    h.look()
    node.store.deploy(Deployment(model="/no/such/model"))
    report = h.look()
    assert (report.state, h.fleets) == (HostState.FAILED, [])
    assert "There is no directory '/no/such/model'" in str(report.error)
    h.no_place = "This host has 0 GPU(s)"
    node.store.deploy(QWEN3)
    assert (h.look().error, node.store.status().state) == (
        "This host has 0 GPU(s)",
        DeploymentState.FAILED,
    )


def test_an_error_of_the_system_fails_a_deployment_too(node: Node) -> None:
    def has_no_threads(*_: object) -> Fleet:
        raise RuntimeError("can't start new thread")

    h = node.host()
    h.look()
    h.follower.start_fleet = has_no_threads
    node.store.deploy(QWEN3)
    assert (h.look().error, node.store.status().state) == (
        """RuntimeError("can't start new thread")""",
        DeploymentState.FAILED,
    )


def test_one_host_that_fails_beside_another_stays_failed(node: Node) -> None:
    first, second = node.host(name="h1"), node.host(name="h2")
    first.look()
    second.look()
    node.store.deploy(LLAMA)
    first.look()
    second.look()
    first.serve()
    second.fleet.why = "no memory"
    assert [second.look().state for _ in range(3)] == [HostState.FAILED] * 3
    assert node.store.status().state is DeploymentState.RUNNING


def test_a_host_that_joins_later_serves_it_too(node: Node) -> None:
    node.asked_for_llama()
    second = node.host(name="h2")
    assert second.look().state is HostState.STARTING
    assert second.fleet.options.name == "tiny-llama"


def test_redis_away_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    h = node.asked_for_llama()

    def away() -> None:
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(node.store, "read", away)
        with pytest.raises(ConnectionError):
            h.follower.look()
    assert (h.look().state, h.fleet.n_stops) == (HostState.STARTING, 0)


def test_the_end_of_a_host_ends_its_workers_and_its_report(node: Node) -> None:
    h = node.asked_for_llama()
    h.follower.stop()
    h.follower.stop()
    assert (h.fleet.n_stops > 0, node.store.hosts()) == (True, [])
    h.follower.look()
    assert len(h.fleets) == 1


def test_a_look_that_hangs_does_not_keep_a_host_from_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.supervise.follower.LAST_LOOK_S", 0.01)
    hangs, goes_on = threading.Event(), threading.Event()
    h = node.host()
    h.look()

    def hang(*_: object) -> Fleet:
        hangs.set()
        goes_on.wait(120)
        raise UsageError("no GPU")

    h.follower.start_fleet = hang
    node.store.deploy(LLAMA)
    with ThreadPoolExecutor() as threads:
        look = threads.submit(h.follower.look)
        try:
            assert hangs.wait(60)
            threads.submit(h.follower.stop).result(60)
        finally:
            goes_on.set()
        look.result(60)


@pytest.mark.parametrize(
    "wanted",
    [
        '{"model": "~\\u0000"}',
        '{"model": "~nobody/x"}',
        '{"model": ""}',
        '{"model": "a/b", "tensor_parallel": 100000000000}',
        '{"model": "a/b", "vllm_args": [1]}',
        "?",
    ],
)
def test_a_host_survives_every_record(node: Node, wanted: str) -> None:
    h = node.host()
    h.look()
    record: Any = {"generation": "7", "wanted": wanted, "by": "request", "asked_at": "0"}
    node.redis.hset(keys.DEPLOYMENT, mapping=record)
    assert h.look(2).host == "h1"
    node.store.withdraw()
    assert h.look(2).state is HostState.IDLE
    node.store.deploy(LLAMA)
    assert (h.look().state, h.fleet.options.name) == (HostState.STARTING, "tiny-llama")
    assert h.look().left_out == tuple(h.fleet.left_out)
