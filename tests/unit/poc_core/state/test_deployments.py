"""What the node shall run: one deployment at a time, failed when all hosts have failed."""

from typing import Any

import pytest
from redis import Redis

from poc_core.errors import DeployedError, NoHostError
from poc_core.machine_figures import MachineFigures
from poc_core.serving.deployments import (
    KEPT_S,
    Deployment,
    DeploymentRecord,
    DeploymentState,
    HostLogs,
    HostReport,
    HostState,
)
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.deployments import FIGURES_S, DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import Clock, known, worker_record

LLAMA = Deployment(model="tiny-llama", dtype="float32", vllm_args=("--max-model-len", "512"))
QWEN3 = Deployment(model="Qwen/Qwen3-8B", served_model_name="qwen3", tensor_parallel=4)


@pytest.fixture
def store(redis: Redis, settings: Settings, clock: Clock) -> DeploymentStore:
    return DeploymentStore(redis, settings, clock)


def report(store: DeploymentStore, state: HostState, host: str = "h1", **changes: Any) -> None:
    """As a host does that follows the record; `changes` to its report."""
    record = store.read()
    said: dict[str, Any] = {"generation": record.generation if record else 0, "workers": 2}
    if record and record.wanted:
        said["model"] = record.wanted.name
    store.report(HostReport(id=host, host=host, state=state, **(said | changes)))


def read(store: DeploymentStore) -> DeploymentRecord:
    return known(store.read())


def state(store: DeploymentStore) -> DeploymentState:
    return store.status().state


def test_what_was_asked_for_is_kept_as_it_was_said(store: DeploymentStore, clock: Clock) -> None:
    report(store, HostState.IDLE)
    assert store.read() is None
    assert store.deploy(LLAMA) == 1
    record = read(store)
    assert (record.wanted, record.by) == (LLAMA, "request")
    assert (record.asked_at, record.error) == (clock.now, None)


def test_the_record_has_no_ttl_and_everything_else_has(
    store: DeploymentStore, redis: Redis
) -> None:
    report(store, HostState.IDLE)
    store.deploy(LLAMA)
    report(store, HostState.SERVING)
    store.withdraw()
    assert [key for key in redis.scan_iter() if redis.ttl(key) == -1] == [keys.DEPLOYMENT.encode()]


def test_it_runs_when_one_host_serves_it(store: DeploymentStore, clock: Clock) -> None:
    report(store, HostState.IDLE)
    report(store, HostState.IDLE, "h2")
    assert state(store) is DeploymentState.IDLE
    store.deploy(QWEN3)
    assert state(store) is DeploymentState.STARTING
    report(store, HostState.STARTING)
    report(store, HostState.FAILED, "h2", error="no GPU")
    assert state(store) is DeploymentState.STARTING
    clock.now += 7
    report(store, HostState.SERVING)
    assert state(store) is DeploymentState.RUNNING
    assert read(store).settled_at == clock.now
    assert [(host.id, host.state, host.error) for host in store.hosts()] == [
        ("h1", HostState.SERVING, None),
        ("h2", HostState.FAILED, "no GPU"),
    ]


def test_a_report_on_an_earlier_deployment_says_nothing_of_this_one(store: DeploymentStore) -> None:
    report(store, HostState.IDLE)
    store.deploy(QWEN3)
    store.withdraw()
    store.deploy(LLAMA)
    report(store, HostState.SERVING, generation=1)
    assert state(store) is DeploymentState.STARTING
    report(store, HostState.FAILED, generation=1, error="old")
    assert state(store) is DeploymentState.STARTING


def test_it_has_failed_when_every_host_that_lives_has(store: DeploymentStore, redis: Redis) -> None:
    for host in ("h1", "h2", "h3"):
        report(store, HostState.IDLE, host)
    store.deploy(QWEN3)
    report(store, HostState.FAILED, "h1", error="first")
    report(store, HostState.STARTING, "h2")
    assert state(store) is DeploymentState.STARTING
    report(store, HostState.FAILED, "h2", error="second")
    assert state(store) is DeploymentState.STARTING  # h3 has not seen it yet
    redis.delete(keys.host("h3"))
    report(store, HostState.FAILED, "h1", error="first")
    assert state(store) is DeploymentState.FAILED
    assert read(store).error == "first"


def test_what_was_stopped_while_it_loaded_goes_on_if_the_very_same_comes_in_time(
    store: DeploymentStore, clock: Clock
) -> None:
    report(store, HostState.IDLE)
    store.deploy(LLAMA)
    for again in range(3):  # the network node stops a long load as often as it takes
        report(store, HostState.STARTING)
        clock.now += 900
        store.withdraw(keeps=True)
        assert store.withdraw(keeps=True) == store.withdraw(keeps=True)  # idempotent
        report(store, HostState.KEEPING)
        assert (store.keeping(), store.status().is_gone) == ({"h1"}, True)
        clock.now += KEPT_S
        store.deploy(Deployment.model_validate(LLAMA.model_dump(exclude_unset=True)))
        assert (read(store).engines, state(store)) == (1, DeploymentState.STARTING), again
    report(store, HostState.SERVING)
    assert state(store) is DeploymentState.RUNNING


@pytest.mark.parametrize(
    "why", ["another", "late", "served", "failed", "not kept", "ended", "start"]
)
def test_else_it_begins_anew(store: DeploymentStore, clock: Clock, why: str) -> None:
    report(store, HostState.IDLE)
    store.deploy(LLAMA)
    report(store, HostState.STARTING)
    if why == "served":
        report(store, HostState.SERVING)
    if why == "failed":
        report(store, HostState.FAILED, error="no GPU")
    store.withdraw(keeps=why != "not kept")
    record = read(store)
    assert record.cancelled is (why not in ("served", "failed"))
    if why == "ended":
        generation = record.generation
        assert store.withdraw() == generation + 1
        assert not store.status().is_gone
        assert store.withdraw() == generation + 1
    clock.now += KEPT_S + (why == "late")
    wanted = LLAMA.model_copy(update={"vllm_args": ()}) if why == "another" else LLAMA
    if why == "start":
        store.leave("h1")
        assert store.deploy_first(wanted, "h2")
    else:
        store.deploy(wanted)
    record = read(store)
    assert (record.engines, record.cancelled) == (record.generation, False)


HEAD, OTHER_HEAD = "10.0.0.1:7070", "10.0.0.3:7070"


@pytest.mark.parametrize("gives_up", ["head", "follower"])
@pytest.mark.parametrize("waits", [HostState.STARTING, HostState.SERVING, HostState.STOPPING])
def test_an_engine_of_which_a_host_gives_up_has_failed_on_all_its_hosts(
    store: DeploymentStore, gives_up: str, waits: HostState
) -> None:
    """Those that are left wait for that host, for ever."""
    left = "follower" if gives_up == "head" else "head"
    for host in (gives_up, left):
        report(store, HostState.IDLE, host, engine_at=HEAD)
    report(store, HostState.IDLE, "alone")
    store.deploy(QWEN3)
    report(store, HostState.STARTING, "alone")
    report(store, HostState.FAILED, gives_up, engine_at=HEAD, error="no such model here")
    report(store, waits, left, engine_at=HEAD)
    report(store, HostState.FAILED, gives_up, engine_at=HEAD, error="no such model here")
    assert waits is HostState.SERVING or state(store) is DeploymentState.STARTING
    report(store, HostState.FAILED, "alone", error="no GPU")
    assert state(store) is DeploymentState.FAILED


def test_an_engine_goes_on_where_a_host_of_another_gives_up(store: DeploymentStore) -> None:
    for host, engine_at in (("a", HEAD), ("b", HEAD), ("c", OTHER_HEAD), ("d", OTHER_HEAD)):
        report(store, HostState.IDLE, host, engine_at=engine_at)
    store.deploy(QWEN3)
    report(store, HostState.STARTING, "a", engine_at=HEAD)
    report(store, HostState.STARTING, "b", engine_at=HEAD)
    report(store, HostState.STARTING, "c", engine_at=OTHER_HEAD)
    report(store, HostState.FAILED, "d", engine_at=OTHER_HEAD, error="no such model here")
    assert state(store) is DeploymentState.STARTING


def test_an_engine_that_hosts_began_with_waits_for_one_that_gave_up(store: DeploymentStore) -> None:
    """That host's command has ended, and whoever watches it starts it again."""
    store.deploy_first(QWEN3, "a")
    report(store, HostState.STARTING, "a", engine_at=HEAD)
    report(store, HostState.FAILED, "b", engine_at=HEAD, error="no such model here")
    assert state(store) is DeploymentState.STARTING


def test_another_is_refused_while_one_runs_or_starts_and_not_after_it_failed(
    store: DeploymentStore,
) -> None:
    report(store, HostState.IDLE)
    store.deploy(QWEN3)
    for seen in (HostState.STARTING, HostState.SERVING):
        report(store, seen)
        with pytest.raises(DeployedError, match=r"POST /api/v1/stop first"):
            store.deploy(LLAMA)
    report(store, HostState.FAILED, error="lost")
    assert store.deploy(LLAMA) == 2
    assert state(store) is DeploymentState.STARTING


def test_without_a_host_nothing_is_deployed(store: DeploymentStore) -> None:
    with pytest.raises(NoHostError, match="start `proofline up`"):
        store.deploy(QWEN3)
    assert store.read() is None


def test_a_call_that_is_repeated_as_its_answer_was_lost_deploys_once(
    store: DeploymentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(store, HostState.IDLE)
    script = scripts.load(vars(store)["_redis"], "deploy")
    monkeypatch.setattr(store, "_deploy", lambda *given: (script(*given), script(*given))[1])
    assert store.deploy(QWEN3) == 1


def test_a_withdrawal_is_over_when_every_host_is_idle(store: DeploymentStore) -> None:
    for host in ("h1", "h2"):
        report(store, HostState.IDLE, host)
    store.deploy(QWEN3)
    for host in ("h1", "h2"):
        report(store, HostState.SERVING, host)
    assert store.withdraw() == store.withdraw() == 2
    assert (state(store), store.status().is_gone) == (DeploymentState.IDLE, False)
    report(store, HostState.IDLE, "h1")
    report(store, HostState.STOPPING, "h2")
    assert not store.status().is_gone
    store.leave("h2")
    assert store.status().is_gone


def test_what_was_served_before_is_not_known_any_more(
    store: DeploymentStore, workers: WorkerRegistry
) -> None:
    report(store, HostState.IDLE)
    workers.heartbeat(worker_record("w1"))
    workers.remove("w1")
    assert workers.known_models()
    store.deploy(LLAMA)
    assert workers.known_models() == {}


# A host's own --model.


def test_the_first_hosts_model_is_the_first_deployment(store: DeploymentStore) -> None:
    assert store.deploy_first(QWEN3, "h1")
    record = read(store)
    assert (record.wanted, record.by, record.generation) == (QWEN3, "start", 1)


def test_only_a_host_that_begins_again_replaces_what_it_runs(store: DeploymentStore) -> None:
    store.deploy_first(QWEN3, "h1")
    report(store, HostState.SERVING, "h1")
    assert not store.deploy_first(LLAMA, "h2")
    assert store.deploy_first(LLAMA, "h1")
    report(store, HostState.SERVING, "h1")
    store.leave("h1")
    assert store.deploy_first(QWEN3, "h2")


def test_a_restart_finds_what_a_request_deployed(store: DeploymentStore) -> None:
    report(store, HostState.IDLE)
    store.deploy(QWEN3)
    store.leave("h1")
    assert not store.deploy_first(LLAMA, "h2")
    assert read(store).wanted == QWEN3


def test_a_node_that_runs_nothing_takes_the_model_of_the_first_host_that_begins(
    store: DeploymentStore,
) -> None:
    report(store, HostState.IDLE)
    store.withdraw()
    assert not store.deploy_first(QWEN3, "h2")  # h1 waits for a request too
    store.leave("h1")
    assert store.deploy_first(QWEN3, "h2")
    assert state(store) is DeploymentState.STARTING


# Records that others have written.


def test_a_record_of_an_earlier_version_is_read(store: DeploymentStore, redis: Redis) -> None:
    wanted = '{"model": "tiny-llama", "dtype": null, "tensor_parallel": 2, "vllm_args": []}'
    record: Any = {"generation": 7, "wanted": wanted, "by": "request", "asked_at": 1.5}
    redis.hset(keys.DEPLOYMENT, mapping=record)
    found = read(store)
    assert found.wanted == Deployment(model="tiny-llama", tensor_parallel=2)
    assert found.wanted.model_fields_set == {"model", "tensor_parallel", "vllm_args"}


@pytest.mark.parametrize(
    "record",
    [
        {"generation": "x", "wanted": "", "by": "request", "asked_at": "0"},
        {"generation": "9" * 5000, "wanted": "", "by": "request", "asked_at": "0"},
        {"generation": "7", "wanted": "{", "by": "request", "asked_at": "0"},
        {"generation": "7", "wanted": "[1]", "by": "request", "asked_at": "0"},
        {"generation": "7", "wanted": "{}", "by": "request", "asked_at": "0"},
        {"generation": "7", "wanted": b"\xff", "by": "request", "asked_at": "0"},
        {"generation": "7", "wanted": '{"model": "m", "tensor_parallel": 0}', "by": "start"},
        {"generation": "7", "wanted": "", "by": "request", "asked_at": "soon"},
        {"wanted": ""},
    ],
)
def test_a_record_that_nobody_can_read_says_so_and_can_be_replaced(
    store: DeploymentStore, redis: Redis, record: Any
) -> None:
    redis.hset(keys.DEPLOYMENT, mapping=record)
    found = read(store)
    assert (found.wanted, state(store)) == (None, DeploymentState.FAILED)
    assert "cannot be read" in str(found.error)
    report(store, HostState.IDLE)
    store.withdraw()
    store.deploy(LLAMA)
    assert state(store) is DeploymentState.STARTING


def test_what_nobody_can_read_of_one_host_hides_no_other(
    store: DeploymentStore, redis: Redis
) -> None:
    for host in ("h1", "h2", "h3"):
        report(store, HostState.IDLE, host)
        store.store_logs(host, HostLogs(host=host, workers=[]))
        store.store_machine(host, MachineFigures(host=host, read_at=1))
    redis.hset("poc:host:h1", "report", "{")
    redis.set("poc:host:h2", "no hash")
    for key in ("poc:host:h1:logs", "poc:host:h1:machine"):
        redis.set(key, '{"host": 5}')
    assert [one.host for one in store.hosts()] == ["h3"]
    assert [one.host for one in store.logs()] == ["h2", "h3"]
    assert [one.host for one in store.machines()] == ["h2", "h3"]
    assert state(store) is DeploymentState.IDLE


class TestMachines:
    def test_are_those_of_the_hosts_that_live_the_latest_of_each(
        self, store: DeploymentStore
    ) -> None:
        def figures(host: str, read_at: float) -> MachineFigures:
            return MachineFigures(host=host, read_at=read_at)

        for host_id, told in {
            "h2": figures("b", 1),
            "h1": figures("a", 2),
            "h3": figures("b", 3),
        }.items():
            store.report(HostReport(id=host_id, host=told.host, state=HostState.IDLE, generation=0))
            store.store_machine(host_id, told)
        store.store_machine("gone", figures("c", 4))
        assert store.machines() == [figures("a", 2), figures("b", 3)]
        store.leave("h3")
        assert store.machines() == [figures("a", 2), figures("b", 1)]

    def test_of_one_that_tells_nothing_any_more_are_forgotten(
        self, store: DeploymentStore, redis: Redis
    ) -> None:
        store.store_machine("h1", MachineFigures(host="a", read_at=1))
        assert 0 < redis.ttl("poc:host:h1:machine") <= FIGURES_S
