"""A host follows the deployment in Redis, with fleets that only remember their orders."""

import time
from dataclasses import replace
from typing import Any, cast

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from cli.shipped import shipped_models
from cli.supervise.fleet import Fleet
from cli.supervise.follower import Follower, deployed_options
from cli.terminal import UsageError
from poc_core.errors import ArgumentsError, OptionsError
from poc_core.serving.deployments import (
    KEPT_S,
    ChildLog,
    Deployment,
    DeploymentRecord,
    DeploymentState,
    HostLogs,
    HostReport,
    HostState,
)
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import Clock, known, worker_record
from tests.peers.fake_fleet import FakeFleet
from workers.engines.options import EngineOptions, HostSpan

LLAMA = Deployment(model="tiny-llama")
QWEN3 = Deployment(model="tiny-qwen3")
SYNTHETIC = EngineOptions(model="", engine="synthetic")
OWN = EngineOptions(
    model=str(shipped_models()["tiny-qwen3"]), served_model_name="tiny-qwen3", engine="synthetic"
)


class Host:
    """One that looks when it is told to."""

    def __init__(
        self,
        store: DeploymentStore,
        registry: WorkerRegistry,
        options: EngineOptions,
        name: str = "h1",
    ) -> None:
        self.fleets: list[FakeFleet] = []
        self.said: list[str] = []
        self.no_place: str | None = None
        self.store = store
        self.follower = Follower(store, registry, name, options, self._start, self.said.append)

    def _start(self, options: EngineOptions, own: bool) -> Fleet:
        if self.no_place:
            raise UsageError(self.no_place)
        self.fleets.append(FakeFleet(options))
        return cast(Fleet, self.fleets[-1])

    def look(self, times: int = 1) -> HostReport:
        """What it reports then."""
        for _ in range(times):
            self.follower.look()
            if (ending := vars(self.follower)["_ending"]) is not None:
                ending.join()
        return next(report for report in self.store.hosts() if report.id == self.follower.id)

    @property
    def fleet(self) -> FakeFleet:
        return self.fleets[-1]

    def serve(self) -> HostReport:
        self.fleet.is_serving = True
        return self.look()


class Node:
    """The hosts of a node, and the deployment that they follow."""

    def __init__(self, store: DeploymentStore, workers: WorkerRegistry, redis: Redis) -> None:
        self.store, self.workers, self.redis = store, workers, redis

    def host(self, options: EngineOptions = SYNTHETIC, name: str = "h1") -> Host:
        return Host(self.store, self.workers, options, name)

    def record(self) -> DeploymentRecord:
        return known(self.store.read())

    def asked_for_llama(self) -> Host:
        """A host that starts what it was asked for while it had no model."""
        h = self.host()
        h.look()
        self.store.deploy(LLAMA)
        h.look()
        return h

    def stopped_while_it_loads(self) -> Host:
        """A host whose model the network node has stopped after 15 minutes of loading."""
        h = self.asked_for_llama()
        self.store.withdraw(keeps=True)
        report = h.look()
        status = self.store.status()
        assert (report.state, status.state) == (HostState.KEEPING, DeploymentState.IDLE)
        assert status.is_gone
        return h


@pytest.fixture
def node(redis: Redis, settings: Settings, clock: Clock, workers: WorkerRegistry) -> Node:
    return Node(DeploymentStore(redis, settings, clock), workers, redis)


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


# A Redis that was emptied.


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


# A --model of its own.


def test_a_hosts_own_model_is_the_first_deployment(node: Node) -> None:
    h = node.host(OWN)
    h.look()
    h.serve()
    status = node.store.status()
    assert status.wanted is not None
    assert (status.state, status.wanted.label) == (DeploymentState.RUNNING, "tiny-qwen3")
    assert h.fleet.options == OWN


def test_hosts_each_serve_their_own_where_nobody_deployed_anything(node: Node) -> None:
    llama = OWN.model_copy(
        update={"model": str(shipped_models()["tiny-llama"]), "served_model_name": "tiny-llama"}
    )
    first, second, third = node.host(OWN), node.host(llama, "h2"), node.host(name="h3")
    for one in (first, second, third):
        one.look()
    assert [one.fleet.options.name for one in (first, second, third)] == [
        "tiny-qwen3",
        "tiny-llama",
        "tiny-qwen3",
    ]
    node.store.withdraw()
    for one in (first, second, third):
        assert one.look(2).state is HostState.IDLE


def test_what_a_request_deployed_goes_before_it_and_that_is_said(node: Node) -> None:
    first = node.host()
    first.look()
    node.store.deploy(LLAMA)
    first.follower.stop()
    h = node.host(OWN)
    h.look()
    assert h.fleet.options.name == "tiny-llama"
    assert h.said == [
        "tiny-llama is deployed, and that counts more than --model; `proofline deploy` changes it"
    ]


def test_its_failure_ends_the_command(node: Node) -> None:
    h = node.host(OWN)
    h.look()
    h.fleet.why = "gone"
    h.look(2)
    assert (h.follower.failure(), h.follower.waits) == ("gone", False)
    assert node.store.status().state is DeploymentState.FAILED


def test_having_no_place_for_it_ends_the_command(node: Node) -> None:
    h = node.host(OWN)
    h.no_place = "no GPU"
    with pytest.raises(UsageError, match="no GPU"):
        h.follower.begin()


# From the record to an engine's options.


@pytest.mark.parametrize(
    ("wanted", "defaults", "expected"),
    [
        (
            Deployment(model="Qwen/Qwen3-8B", tensor_parallel=4, vllm_args=("--seed", "1")),
            EngineOptions(
                model="", dtype="bfloat16", tensor_parallel=2, vllm_args=("--enforce-eager",)
            ),
            {
                "dtype": "bfloat16",
                "tensor_parallel": 4,
                "vllm_args": ("--enforce-eager", "--seed", "1"),
            },
        ),
        (
            Deployment(model="Qwen/Qwen3-8B", served_model_name="q"),
            EngineOptions(
                model="other", dtype="float32", tensor_parallel=2, vllm_args=("--enforce-eager",)
            ),
            {"served_model_name": "q"},
        ),
        (
            Deployment(
                model="Qwen/Qwen3-8B", tensor_parallel=4, dtype="float32", vllm_args=("--seed", "1")
            ),
            EngineOptions(model="other", engine="synthetic", synthetic_step_ms=7),
            {"engine": "synthetic", "synthetic_step_ms": 7, "dtype": "float32"},
        ),
    ],
    ids=[
        "defaults of a host without a model",
        "another model's options are not this one's",
        "no vLLM",
    ],
)
def test_what_workers_are_told(
    wanted: Deployment, defaults: EngineOptions, expected: dict[str, Any]
) -> None:
    name = {"model": "Qwen/Qwen3-8B", "served_model_name": "Qwen/Qwen3-8B"}
    assert deployed_options(wanted, defaults) == EngineOptions(**name | expected)


@pytest.mark.promise("a compromised host", "cannot run code on other hosts")
@pytest.mark.parametrize(
    "words",
    [
        ("--middleware", "os.system"),
        ("--tool-parser-plugin", "/tmp/x.py"),
        ("--chat-template", "/etc/passwd"),
    ],
)
def test_a_record_runs_no_code_on_a_host(words: tuple[str, ...]) -> None:
    """Also one that no API has checked: who may write it is not who may deploy."""
    with pytest.raises(ArgumentsError):
        deployed_options(Deployment(model="acme/m", vllm_args=words), EngineOptions(model=""))


@pytest.mark.promise("a compromised host", "cannot run code on other hosts")
def test_a_record_makes_no_host_trust_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = ("--trust-remote-code", "--revision", "a" * 40)
    wanted = Deployment(model="acme/m", vllm_args=pinned)
    here = EngineOptions(model="")
    assert deployed_options(wanted, here).vllm_args == pinned[1:]
    monkeypatch.setenv("POC_TRUSTED_MODELS", f"acme/m@{'a' * 40}")
    assert deployed_options(wanted, here).vllm_args == pinned


def test_a_directory_is_served_under_its_name() -> None:
    wanted = Deployment(model=str(shipped_models()["tiny-llama"]))
    assert deployed_options(wanted, SYNTHETIC).name == wanted.name == "tiny-llama"


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


def test_a_head_waits_no_more_for_a_follower_that_gave_up_what_was_deployed(node: Node) -> None:
    spans = [HostSpan(n_hosts=2, rank=n, head_host="10.0.0.1", head_port=7070) for n in (0, 1)]
    head, part = (node.host(EngineOptions(model="", span=span), f"h{span.rank}") for span in spans)
    for one in (head, part):
        one.look()
    node.store.deploy(Deployment(model="tiny-llama", tensor_parallel=2))
    for one in (head, part):
        assert one.look().state is HostState.STARTING
    part.fleet.why = "h1/cpu0 ended (exit code 1); not restarted: it has no such model."
    assert part.look().state is HostState.FAILED
    assert head.look(3).state is HostState.IDLE
    assert head.fleet.n_stops == 1
    record = node.record()
    assert record.error == part.fleet.why
    assert node.store.status().state is DeploymentState.FAILED


def test_a_deployment_is_divided_among_the_hosts_of_an_engine() -> None:
    span = HostSpan(n_hosts=2, rank=1, head_host="10.0.0.1", head_port=7070)
    waiting = EngineOptions(model="", span=span)
    wanted = Deployment(model="tiny-llama", tensor_parallel=2)
    assert deployed_options(wanted, waiting).span == span
    with pytest.raises(OptionsError, match="2 hosts cannot share 1 device"):
        deployed_options(LLAMA, waiting)
