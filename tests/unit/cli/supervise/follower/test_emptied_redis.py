"""A Redis that was emptied, or went back to an older state."""

from dataclasses import replace

import pytest

from poc_core.serving.deployments import HostState
from tests.harness.samples import known
from tests.peers.hosts import LLAMA, OWN, SYNTHETIC, Node
from workers.engines.options import EngineOptions


@pytest.mark.parametrize("options", [SYNTHETIC, OWN], ids=["deployed", "own --model"])
def test_a_redis_that_lost_everything_gets_the_deployment_back_and_the_model_goes_on(
    node: Node, options: EngineOptions
) -> None:
    h = node.host(options)
    h.look()
    if options is SYNTHETIC:
        node.store.deploy(LLAMA)
        h.look()
    h.serve()
    before = node.store.read()
    node.redis.flushall()
    assert h.look().state is HostState.SERVING
    after = node.record()
    assert after.restored_at is not None
    assert replace(after, restored_at=None) == before
    assert (len(h.fleets), h.fleet.n_stops) == (1, 0)
    assert "Redis lost its records" in h.said[-1]
    assert any("Redis lost its records" in event.text for event in node.store.events.read())
    h.look()
    assert len(h.said) == len(set(h.said))


def test_what_was_withdrawn_stays_so_and_what_failed_too(node: Node) -> None:
    h = node.asked_for_llama()
    h.fleet.why = "no room"
    h.look(2)
    node.redis.flushall()
    h.look()
    record = node.record()
    assert record.error == "no room"
    node.store.withdraw()
    h.look(2)
    node.redis.flushall()
    assert h.look().state is HostState.IDLE
    record = node.record()
    assert (record.generation, record.wanted) == (2, None)


def test_what_a_request_says_after_the_loss_counts_more_than_what_hosts_know(node: Node) -> None:
    first, second = node.asked_for_llama(), node.host(name="h2")
    second.look()
    node.redis.flushall()
    node.store.withdraw()
    assert [one.look(2).state for one in (first, second)] == [HostState.IDLE] * 2
    record = node.record()
    assert (record.wanted, record.restored_at) == (None, None)


def test_a_redis_from_an_older_file_does_not_bring_back_what_was_withdrawn(node: Node) -> None:
    h = node.asked_for_llama()
    older = known(node.redis.dump("poc:deployment"))
    node.store.withdraw()
    h.look(2)
    node.redis.flushall()
    node.redis.restore("poc:deployment", 0, older)
    node.redis.hincrbyfloat("poc:deployment", "asked_at", -60.0)
    assert h.look(2).state is HostState.IDLE
    record = node.record()
    assert (record.generation, record.wanted) == (2, None)


def test_of_several_hosts_knowledge_the_newest_counts(node: Node) -> None:
    first, second = node.asked_for_llama(), node.host(name="h2")
    second.look()
    node.store.withdraw()
    first.look(2)  # the second host has not seen that yet
    node.redis.flushall()
    second.look()
    assert node.store.read() != first.follower._known  # noqa: SLF001
    assert [one.look(2).state for one in (first, second)] == [HostState.IDLE] * 2
    assert first.look().state is HostState.IDLE


def test_a_host_that_starts_on_an_empty_redis_does_not_replace_what_others_run(node: Node) -> None:
    first = node.asked_for_llama()
    node.store.withdraw()
    node.store.deploy(LLAMA)
    first.look(2)
    first.serve()
    node.redis.flushall()
    late = node.host(OWN, "h2")
    late.look()
    assert (first.look().model, len(first.fleets)) == ("tiny-llama", 2)
    assert late.look(2).model == "tiny-llama"


def test_a_host_that_knew_of_no_deployment_restores_none(node: Node) -> None:
    h = node.host()
    h.look()
    node.redis.flushall()
    assert h.look().state is HostState.IDLE
    assert node.store.read() is None
