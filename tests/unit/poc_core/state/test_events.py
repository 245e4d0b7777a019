"""What happened to the node, each in a sentence."""

import re
from typing import Any

import pytest
from redis import Redis

from poc_core.records import RoundState
from poc_core.serving.deployments import Deployment, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.deployments import DeploymentStore
from poc_core.state.events import Event, Events
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    new_job,
    round_config,
)


@pytest.fixture
def events(redis: Redis, clock: Clock) -> Events:
    return Events(redis, clock)


def told(events: Events) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in events.read()]


def test_the_newest_event_comes_first_of_whatever_kind(events: Events, clock: Clock) -> None:
    events.note("worker", "w ended")
    clock.now += 0.5
    events.note("key", "k is used", "k")
    assert [(one.at, one.kind, one.about) for one in events.read()] == [
        (1_000_000.5, "key", "k"),
        (1_000_000.0, "worker", ""),
    ]
    assert events.count() == 2


def test_many_of_one_kind_displace_none_of_another(events: Events) -> None:
    events.note("worker", "w ended")
    for n in range(200):
        events.note("refused", f"refusal {n}")
    found = told(events)
    assert ("worker", "w ended") in found
    assert ("refused", "refusal 199") in found
    assert len(found) == 151


def test_a_thousand_are_kept_in_all() -> None:
    found = known(re.search(r"local MOST_EVENTS =\s+\{(.*)\}", scripts.source("common")))
    assert sum(int(n) for n in re.findall(r"= (\d+)", found[1])) == 1000


def test_an_event_that_cannot_be_read_hides_no_other(events: Events, redis: Redis) -> None:
    events.note("worker", "w ended")
    redis.lpush(keys.events("worker"), "no JSON")
    assert told(events) == [("worker", "w ended")]


@pytest.mark.promise(
    "a compromised host",
    "cannot write other hosts' records (Redis 7), forge events of keys, "
    "or stay listed without a heartbeat",
)
def test_an_event_of_another_kind_than_its_list_is_none(events: Events, redis: Redis) -> None:
    """A worker's user may write to some lists; what only the API sees it cannot forge."""
    events.note("worker", "w ended")
    forged = Event(at=1.0, kind="refused", text="nobody was refused", about="")
    redis.lpush(keys.events("worker"), forged.model_dump_json())
    assert told(events) == [("worker", "w ended")]


def test_rounds_tell_their_states(events: Events, rounds: RoundStore, clock: Clock) -> None:
    round_id = rounds.store(round_config(), RoundState.IDLE)
    current: Any = rounds.current()
    for state, why in (("GENERATING", ""), ("STOPPED", "out of memory"), ("STOPPED", "again")):
        clock.now += 1
        rounds.switch(current, RoundState(state), why)
    name = f"Round {round_id[:8]}"
    assert told(events) == [
        ("round", f"{name} goes from GENERATING to STOPPED: out of memory"),
        ("round", f"{name} goes from IDLE to GENERATING."),
        ("round", f"{name} begins as IDLE."),
    ]
    assert {event.about for event in events.read()} == {round_id}


def test_a_job_that_fails_tells_why_and_one_that_is_cancelled_nothing(
    events: Events, jobs: JobStore
) -> None:
    failed, cancelled = jobs.create(new_job([1])), jobs.create(new_job([2]))
    jobs.fail(failed, "no engine")
    jobs.cancel(cancelled)
    assert told(events) == [("job", f"Job {failed[:8]} failed: no engine")]


def test_a_validation_counts_for_its_day_and_a_fraud_is_an_event(
    events: Events, jobs: JobStore, clock: Clock
) -> None:
    for claim in ("A" * 32, "P" * 32):
        job_id = jobs.create(new_job([1, 2], claimed={1: claim, 2: claim}))
        lease_batch(jobs, job_id, 0, "w1")
        complete_batch(jobs, job_id, 0, ["A" * 32, "A" * 32])
        assert jobs.finish(job_id)
    assert jobs.validations(clock.now) == {"honest": 1, "fraud": 1}
    assert jobs.validations(clock.now + 86_400) == {"honest": 0, "fraud": 0}
    assert told(events) == [("job", f"Job {job_id[:8]} found fraud.")]


def test_a_deployment_tells_its_way(
    events: Events, redis: Redis, settings: Settings, clock: Clock
) -> None:
    store = DeploymentStore(redis, settings, clock)
    report = HostReport(id="h1-7", host="h1", state=HostState.IDLE, generation=0)
    store.report(report)
    store.deploy(Deployment(model="tiny-llama"))
    clock.now += 30
    served = {"generation": 1, "state": HostState.SERVING, "model": "tiny-llama"}
    for _ in range(2):
        store.report(report.model_copy(update=served))
    clock.now += 1
    store.withdraw()
    assert told(events) == [
        ("deployment", "The model is taken down: nothing shall run."),
        ("deployment", "tiny-llama serves, 30 s after it was asked for."),
        ("deployment", "tiny-llama is deployed, by a request."),
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [("no room", "no room"), ("x" + 200 * "é", "x" + 149 * "é")],
    ids=["whole", "cut between two characters"],
)
def test_a_model_that_no_host_can_serve_is_told(
    events: Events, redis: Redis, settings: Settings, clock: Clock, error: str, why: str
) -> None:
    store = DeploymentStore(redis, settings, clock)
    report = HostReport(id="h1-7", host="h1", state=HostState.IDLE, generation=0)
    store.report(report)
    store.deploy(Deployment(model="tiny-llama"))
    clock.now += 1
    failed = {"generation": 1, "state": HostState.FAILED, "model": "tiny-llama", "error": error}
    store.report(report.model_copy(update=failed))
    assert told(events)[0] == ("deployment", f"tiny-llama cannot be served: {why}")


def test_a_receiver_in_trouble_is_told_once_and_its_return_too(
    events: Events, rounds: RoundStore, outbox: Outbox, clock: Clock
) -> None:
    round_id = rounds.store(round_config(), RoundState.GENERATING)
    current: Any = rounds.current()
    lease: Any = lease_nonces(rounds, current, "w1", 2)
    complete_lease(rounds, lease, "w1", ["AAAA"] * 2)
    for end in ("failed", "failed", "delivered"):
        clock.now += 60
        delivery = known(outbox.take(round_id))
        if end == "failed":
            outbox.failed(delivery, "it answered 500")
        else:
            outbox.delivered(delivery)
    assert [text for kind, text in told(events) if kind == "receiver"] == [
        f"A payload of {round_id[:8]} was taken after all.",
        f"A payload of {round_id[:8]} was not taken: it answered 500",
    ]


def test_a_receiver_that_does_not_answer_is_told_once(
    events: Events, redis: Redis, clock: Clock
) -> None:
    receivers = Receivers(redis, clock)
    for _ in range(BREAKS_AT + 2):
        receivers.silent("receiver:9000")
    assert told(events) == [
        ("receiver", f"receiver:9000 does not answer: {BREAKS_AT} tries in a row.")
    ]
