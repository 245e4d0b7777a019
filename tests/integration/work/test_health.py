"""A node that is down says so, everywhere and at once, and says when it is well again."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.harness.waiting import wait_until
from tests.integration.node import Node
from tests.integration.processes import frozen
from tests.peers.receiver import Receiver
from tests.stacks.round_client import StackClient, leave_nothing

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("node")]


@pytest.fixture(autouse=True)
def whole(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The node again as it was found, however often a worker was restarted for it."""
    monkeypatch.setattr("poc_core.serving.places.LATELY_S", 0.0)  # restarts count for no time
    yield
    node.wait_whole()
    wait_until(lambda: levels(node) == {"ok"}, "a node that is well")


def console(node: Node) -> dict[str, Any]:
    """All sections that a page of the console begins with."""
    with node.http.stream("GET", "/api/v1/console/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("the console's events ended")


def metrics(node: Node) -> dict[str, float]:
    """The samples of /metrics by name and labels."""
    lines = node.http.get("/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def levels(node: Node) -> set[str]:
    """The level that each of those who tell it tells now."""
    told = metrics(node)
    (in_metrics,) = (
        level
        for level in ("ok", "degraded", "down")
        if told[f'proofline_health{{level="{level}"}}']
    )
    status = node.http.get("/api/v1/pow/status")
    return {
        in_metrics,
        node.http.get("/readyz").json()["health"]["level"],
        node.http.get("/api/v1/inference/up/status").json()["health"]["level"],
        status.json()["health"]["level"] if status.status_code == 200 else "down",
        console(node)["health"]["level"],
    }


def reasons(node: Node) -> str:
    found = node.http.get("/readyz").json()["health"]["reasons"]
    return "; ".join(reason["text"] for reason in found)


def test_killed_workers_show_at_once_and_their_return_is_told(
    node: Node, back: Callable[[], None]
) -> None:
    n_said = len(node.said)
    first, second = node.stack.worker_pids()
    os.kill(first, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: levels(node) == {"degraded"}, "degraded, everywhere")
    print(f"degraded everywhere {time.monotonic() - began:.2f} s after the death")
    assert "1 of 2 workers ready" in reasons(node)
    assert node.http.get("/readyz").status_code == 200
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: levels(node) == {"down"}, "down, everywhere")
    assert "0 of 2 workers ready" in reasons(node)
    assert "ended (killed by SIGKILL) and is started again" in reasons(node)
    assert node.http.get("/readyz").status_code == 503
    back()
    node.wait_whole()
    seats = node.status()["seats"]
    assert [seat["last_exit"] for seat in seats] == ["killed by SIGKILL"] * 2
    host = seats[0]["host"]
    names = [f"{host}/cpu0", f"{host}/cpu1"]
    assert [seat["name"] for seat in seats] == names
    assert [worker["name"] for worker in console(node)["workers"]] == names
    told = metrics(node)
    for name in names:
        assert told[f'proofline_worker_restarts_total{{worker="{name}"}}'] >= 1

    def is_told() -> bool:
        said = "\n".join(node.said[n_said:])
        return all(f"{name} is ready again, after " in said for name in names)

    wait_until(is_told, "both returns")


def test_a_worker_that_nobody_saw_die_is_missed_by_its_signs_of_life(node: Node) -> None:
    pid, _ = node.stack.worker_pids()
    with frozen(pid):
        wait_until(lambda: "gives no sign of life" in reasons(node), "a silent worker")
        wait_until(lambda: levels(node) == {"degraded"}, "degraded, everywhere")


def test_a_redis_that_says_nothing_takes_the_node_down(node: Node) -> None:
    with frozen(node.stack.redis_pid):
        wait_until(
            lambda: node.http.get("/readyz").status_code == 503, "not ready without its Redis"
        )
        assert "Redis does not answer for" in reasons(node)
        assert metrics(node)['proofline_health{level="down"}'] == 1
    wait_until(lambda: "Redis answers again" in "\n".join(node.stack.log_tail("api")), "the end")


@pytest.mark.ends_its_stack  # by a round, which counts from then on
def test_a_receiver_that_refuses_degrades_the_node_with_its_reason(node: Node) -> None:
    client = StackClient(node.stack, node.http, [])
    with Receiver(status=500) as receiver, ExitStack() as exits:
        exits.callback(leave_nothing, client)  # also of a test that fails
        client.start(receiver)
        wait_until(lambda: "refuses" in reasons(node), "a receiver in trouble")
        assert f"receiver {receiver.url} refuses for" in reasons(node)
        assert "answered 500" in reasons(node)
        wait_until(lambda: levels(node) == {"degraded"}, "degraded, everywhere")
        receiver.status = 200
        client.stop()
        client.wait_delivered()


def test_a_courier_that_is_away_is_missed(node: Node, back: Callable[[], None]) -> None:
    client = StackClient(node.stack, node.http, [])
    client.kill("courier")
    wait_until(lambda: "the courier has not been alive for" in reasons(node), "its absence")
    back()
