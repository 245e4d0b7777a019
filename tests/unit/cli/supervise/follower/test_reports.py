"""A host reports its workers."""

from dataclasses import replace

from poc_core.serving.deployments import ChildLog, HostLogs, HostState
from tests.harness.samples import worker_record
from tests.peers.hosts import LLAMA, OWN, Node
from workers.engines.options import HostSpan


def test_what_the_workers_wrote_last_is_told_for_as_long_as_the_host_lives(node: Node) -> None:
    h = node.host(OWN)
    h.look()
    (told,) = node.store.logs()
    assert told == HostLogs(host="h1", workers=[ChildLog(name="h1/cpu0", pid=7, lines=["loaded"])])
    h.follower.stop()
    assert node.store.logs() == []


def test_a_worker_whose_process_ended_is_forgotten_at_once(node: Node) -> None:
    node.store.deploy_first(LLAMA, "h0")
    h = node.host()
    h.look()
    own = replace(worker_record("h1/cpu0-aaaaaa"), host_id=h.follower.id, pid=7)
    for record in (
        own,
        replace(own, id="h1/cpu0-bbbbbb", host_id="another supervisor"),
        replace(own, id="h1/cpu1-cccccc", pid=8),
    ):
        node.workers.heartbeat(record)
    h.look()
    assert node.workers.is_alive(own.id)
    h.fleet.pid = None
    h.look()
    assert [worker.id for worker in node.workers.live()] == ["h1/cpu0-bbbbbb", "h1/cpu1-cccccc"]


def test_a_part_of_another_hosts_engine_says_whose(node: Node) -> None:
    span = HostSpan(n_hosts=2, rank=1, head_host="10.0.0.1", head_port=7070)
    own = OWN.model_copy(update={"engine": "vllm", "tensor_parallel": 2, "span": span})
    h = node.host(own)
    assert h.look().follows == "10.0.0.1:7070"
    assert (h.serve().state, h.said) == (HostState.SERVING, [f"ready: tiny-qwen3: {span}"])
    head = own.model_copy(update={"span": span.model_copy(update={"rank": 0})})
    assert node.host(head, "h2").look().follows == ""
