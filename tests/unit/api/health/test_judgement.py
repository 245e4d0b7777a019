"""The node's health, case by case: what is wrong, since when, in words that tell an operator."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from api.health.judgement import (
    REPLACED_S,
    Health,
    Level,
    Snapshot,
    duration,
    judge,
    replacement,
)
from poc_core.records import RoundRecord, RoundState, WorkerRecord
from poc_core.serving.deployments import (
    Deployment,
    DeploymentRecord,
    DeploymentStatus,
    HostReport,
    HostState,
)
from poc_core.serving.places import WorkerPlace
from poc_core.state.overview import CurrentRound, GoneHost, Overview, RoundRates
from poc_core.state.parsing import BAD_CERTIFICATES, OutboxStatus, SilentReceiver
from tests.harness.samples import MODEL, round_config, worker_record

NOW = 1000.0
TTL_S = 15.0
ASKED = DeploymentRecord(1, Deployment(model=MODEL), "request", asked_at=500.0)
State = Literal["starting", "ready", "draining", "hung"]


def place(i: int, **changes: Any) -> WorkerPlace:
    common: dict[str, Any] = {"pid": i, "is_ready": True, "since": 600.0}
    return WorkerPlace(name=f"h1/gpu{i}", **common | changes)


def report(*places: WorkerPlace, **changes: Any) -> HostReport:
    common: dict[str, Any] = {"id": "h1-1-aaaaaa", "host": "h1", "state": HostState.SERVING}
    return HostReport(**common | {"generation": 1, "model": MODEL, "places": places} | changes)


def start_of(i: int, state: State = "ready", host_id: str = "h1-1-aaaaaa") -> WorkerRecord:
    return replace(worker_record(f"h1/gpu{i}-00000{i}", state=state), host_id=host_id, pid=i)


def seen(
    *workers: WorkerRecord,
    hosts: tuple[HostReport, ...] = (),
    record: DeploymentRecord | None = ASKED,
    silent_s: dict[str, float] | None = None,
    **changes: Any,
) -> Overview:
    left_s = {name: TTL_S - s for name, s in (silent_s or {}).items()}
    ids = [*(worker.id for worker in workers), *(host.id for host in hosts)]
    common: dict[str, Any] = {
        **dict.fromkeys(("callbacks_waiting", "queued_nonces", "total_processed"), 0),
        "round": None,
        "silent": [],
        "gone": [],
        "courier_silent_s": 0.2,
        "courier_trouble": "",
    }
    told = common | {"left_s": dict.fromkeys(ids, TTL_S) | left_s} | changes
    status = DeploymentStatus(record, hosts)
    return Overview(workers=workers, per_second={}, deployment=status, **told)


def health_of(overview: Overview | None, **changes: Any) -> Health:
    return judge(Snapshot(NOW, overview, worker_ttl_s=TTL_S, **changes))


def said(health: Health) -> tuple[str, list[str]]:
    return health.level.value, [reason.text(NOW) for reason in health.reasons]


def two_of(*states: State, **changes: Any) -> Overview:
    hosts = (report(place(0), place(1)),)
    return seen(*(start_of(i, state) for i, state in enumerate(states)), hosts=hosts, **changes)


def test_a_redis_that_was_emptied_lately_is_told_for_ten_minutes() -> None:
    def at(restored_at: float) -> tuple[str, list[str]]:
        record = replace(ASKED, restored_at=restored_at)
        return said(health_of(two_of("ready", "ready", record=record)))

    level, (text,) = at(NOW - 61)
    assert level == "degraded"
    assert text.startswith("Redis lost its records 1 min ago, jobs and rounds among them")
    assert at(NOW - 600) == ("ok", [])


def test_a_node_whose_workers_are_ready_is_ok_since_the_last_of_them_is() -> None:
    hosts = (report(place(0), place(1, since=700.0)),)
    health = health_of(seen(start_of(0), start_of(1), hosts=hosts))
    assert said(health) == ("ok", [])
    assert (health.since, health.n_ready, len(health.seats)) == (700.0, 2, 2)


def test_a_chat_port_that_does_not_answer_degrades() -> None:
    mute = replace(start_of(0), stats={"chat_mute_since": NOW - 12})
    health = health_of(seen(mute, start_of(1), hosts=(report(place(0), place(1)),)))
    reason = "the chat port of h1/gpu0 has not answered for 12 s: chat fails there"
    assert said(health) == ("degraded", [reason])
    lately = replace(mute, stats={"chat_mute_since": NOW - 1})
    assert said(health_of(seen(lately, hosts=(report(place(0)),)))) == ("ok", [])


def test_redis_away_is_down_since_it_was_noticed() -> None:
    health = health_of(None, redis_away_since=NOW - 12)
    assert (said(health), health.since) == (("down", ["Redis does not answer for 12 s"]), 988.0)


def test_a_worker_that_ended_degrades_and_the_last_one_takes_the_node_down() -> None:
    ended = place(0, pid=None, is_ready=False, since=880.0, last_exit="killed by SIGKILL")
    why = "h1/gpu0 ended (killed by SIGKILL) and is started again"
    one = health_of(seen(start_of(1), hosts=(report(ended, place(1)),)))
    assert said(one) == ("degraded", [f"1 of 2 workers ready for 2 min: {why}"])
    assert one.since == 880.0
    both = health_of(seen(hosts=(report(ended, place(1, pid=7, is_ready=False, since=990.0)),)))
    assert said(both) == (
        "down",
        [f"0 of 2 workers ready for 10 s: {why}, h1/gpu1 loads its model"],
    )


def test_workers_that_all_load_their_model_are_told_in_one_word() -> None:
    places = [place(i, is_ready=False, since=959.0) for i in range(8)]
    health = health_of(seen(hosts=(report(*places, state=HostState.STARTING),)))
    assert said(health) == ("down", ["0 of 8 workers ready for 41 s: each loads its model"])


def test_of_many_that_are_missing_three_are_named() -> None:
    places = [
        place(i, pid=None, is_ready=False, since=990.0, last_exit=f"exit code {i}")
        for i in range(1, 6)
    ]
    (told,) = said(health_of(seen(hosts=(report(*places),))))[1]
    assert told.endswith("h1/gpu3 ended (exit code 3) and is started again, and 2 more")


@pytest.mark.parametrize("host_silent_s", [0.3, 9.0])
def test_a_worker_without_a_sign_of_life_counts_no_more_whatever_its_supervisor_says(
    host_silent_s: float,
) -> None:
    worker = start_of(0)
    silent_s = {worker.id: 1.5, "h1-1-aaaaaa": host_silent_s}
    health = health_of(seen(worker, hosts=(report(place(0)),), silent_s=silent_s))
    level, texts = said(health)
    assert (level, texts[0]) == (
        "down",
        "0 of 1 workers ready for 2 s: h1/gpu0 gives no sign of life",
    )
    frozen = ["the supervisor of h1 has been silent for 9 s: a worker that ends there is not"]
    assert [text[: len(frozen[0])] for text in texts[1:]] == frozen * (host_silent_s > 5)


def test_a_sign_of_life_may_come_late() -> None:
    worker = start_of(0)
    assert health_of(seen(worker, hosts=(report(place(0)),), silent_s={worker.id: 1.2})).level == (
        Level.OK
    )


def test_an_engine_that_hangs_and_one_given_up_say_so() -> None:
    lost = place(1, pid=None, is_ready=False, gave_up="h1/gpu1 ended (exit code 3); not restarted")
    texts = said(health_of(seen(start_of(0, "hung"), hosts=(report(place(0), lost),))))[1]
    assert "h1/gpu0 has an engine that hangs" in texts[0]
    assert "h1/gpu1 ended (exit code 3); not restarted" in texts[0]


def test_a_worker_restarted_again_and_again_is_told_while_it_is_ready() -> None:
    restless = place(0, restarts=7, restarts_lately=3, last_exit="exit code 70")
    assert said(health_of(seen(start_of(0), hosts=(report(restless),)))) == (
        "degraded",
        ["worker h1/gpu0 was restarted 3 times in 10 min, last after: exit code 70"],
    )


def test_workers_that_nobody_supervises_count_while_they_live() -> None:
    alone = [worker_record("w1"), worker_record("w2", state="starting")]
    health = health_of(seen(*alone, record=None))
    assert health.level is Level.DEGRADED
    assert [(seat.name, seat.state) for seat in health.seats] == [
        ("w1", "ready"),
        ("w2", "starting"),
    ]


def test_a_node_without_a_worker_says_what_is_missing() -> None:
    nothing = health_of(seen(record=None))
    assert nothing.level is Level.DOWN
    assert "no worker is here: none is started yet" in nothing.text(NOW)
    stopped = health_of(seen(record=ASKED, gone=[GoneHost("h1", 300.0), GoneHost("h2", 995.0)]))
    assert stopped.text(NOW).startswith("no worker is here for 5 s: ")
    idle = report(state=HostState.IDLE, model=None)
    assert said(health_of(seen(hosts=(idle,), record=None))) == (
        "down",
        ["no model is deployed: `proofline deploy MODEL` starts one"],
    )
    failed = replace(ASKED, error="no such model", settled_at=940.0)
    refused = report(state=HostState.FAILED, error="no such model")
    assert said(health_of(seen(hosts=(refused,), record=failed))) == (
        "down",
        [f"{MODEL} could not be deployed for 1 min: no such model"],
    )


def test_a_host_that_fails_or_is_gone_degrades_a_node_that_others_serve() -> None:
    failed = report(host="h2", id="h2-1-bbbbbb", state=HostState.FAILED, error="too few GPUs")
    gone = [GoneHost("h3", 940.0), GoneHost("h4", 400.0)]  # h4: before the model was asked for
    hosts = (report(place(0)), failed)
    assert said(health_of(seen(start_of(0), hosts=hosts, gone=gone))) == (
        "degraded",
        [f"h2 does not serve {MODEL}: too few GPUs", "host h3 has not reported for 1 min"],
    )


def test_a_receiver_that_refuses_degrades_with_its_tries() -> None:
    outbox = OutboxStatus(5, 100, 0, 0, 4, None, "http://receiver:9000/poc answered 500", 960.0)
    record = RoundRecord("r1", RoundState.GENERATING, round_config(), 900.0)
    current = CurrentRound(record, RoundRates({}, {}), [], outbox)
    health = health_of(two_of("ready", "ready", round=current))
    refusal = "receiver http://receiver:9000/poc refuses for 40 s, 4 tries: answered 500"
    assert said(health) == ("degraded", [refusal])
    full = health_of(two_of("ready", "ready", round=current), outbox_max_bytes=100)
    assert said(full)[1][1] == "the round pauses: its receiver takes less than the node computes"
    once = replace(current, outbox=replace(outbox, failures=1))
    assert health_of(two_of("ready", "ready", round=once)).level is Level.OK


def test_a_receiver_of_jobs_that_is_silent_degrades() -> None:
    silent = [SilentReceiver("agg:9000", 6, 1010.0)]
    assert said(health_of(two_of("ready", "ready", silent=silent))) == (
        "degraded",
        ["receiver agg:9000 does not answer, 6 tries"],
    )


@pytest.mark.parametrize(
    ("silent_s", "waiting", "told"),
    [
        (1.0, 3, []),
        (12.0, 0, ["the courier has not been alive for 12 s"]),
        (None, 2, ["no courier runs (`proofline courier`)"]),
        (None, 0, []),
    ],
)
def test_a_courier_is_missed_where_one_was_or_something_waits(
    silent_s: float | None, waiting: int, told: list[str]
) -> None:
    overview = two_of("ready", "ready", courier_silent_s=silent_s, callbacks_waiting=waiting)
    texts = said(health_of(overview))[1]
    assert [text.partition(": ")[0] for text in texts] == told


def test_certificates_that_the_courier_cannot_use_degrade() -> None:
    overview = two_of("ready", "ready", courier_trouble=BAD_CERTIFICATES)
    level, (text,) = said(health_of(overview))
    assert level == "degraded"
    assert text == (
        "the courier's certificates cannot be used"
        " (POC_CALLBACK_CLIENT_CERT, POC_CALLBACK_TRUSTED_CERTS): its log says why"
    )


def test_the_worst_comes_first_and_makes_the_level() -> None:
    health = health_of(two_of(courier_silent_s=60.0))
    assert [reason.kind for reason in health.reasons] == ["workers", "courier"]
    assert health.level is Level.DOWN


def test_two_workers_of_one_name_are_told_apart_and_a_dead_start_of_one_is_not_told() -> None:
    twins = [report(place(0)), report(place(0), id="h1-9-bbbbbb")]
    others = replace(start_of(0, host_id="h1-9-bbbbbb"), id="h1/gpu0-999999")
    health = health_of(seen(start_of(0), others, hosts=tuple(twins)))
    assert [seat.name for seat in health.seats] == ["h1/gpu0#aaaaaa", "h1/gpu0#bbbbbb"]
    dead, alive = start_of(0, host_id=""), replace(start_of(0, host_id=""), id="h1/gpu0-999999")
    health = health_of(seen(dead, alive, record=None, silent_s={dead.id: 9.0}))
    assert [(seat.name, seat.state) for seat in health.seats] == [("h1/gpu0", "ready")]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "119 min"), (7200, "2 h"), (2e5, "2 d")],
)
def test_times_are_told_in_one_unit(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("left_gib", "limit_gib", "short"),
    [
        *((0.9, 16, True), (1.1, 16, False), (3, 64, True), (3.3, 64, False)),
        *((0.4, 1, False), (0.2, 1, True), (20, 2000, False), (15, 2000, True)),
    ],
)
def test_a_host_that_is_short_of_memory_says_so_before_the_kernel_does(
    left_gib: float, limit_gib: float, short: bool
) -> None:
    gib = 1024**3
    memory = (int(left_gib * gib), int(limit_gib * gib))
    health = health_of(seen(start_of(0), hosts=(report(place(0), memory=memory),)))
    told = f"h1 is short of memory: {left_gib:.1f} of {limit_gib:.0f} GiB are left;"
    assert said(health)[0] == ("degraded" if short else "ok")
    assert [text.startswith(told) for text in said(health)[1]] == [True] * short


def test_a_part_of_another_hosts_engine_is_no_worker_and_is_told_while_it_is_missing() -> None:
    head = report(place(1))

    def with_part(**changes: Any) -> Health:
        common: dict[str, Any] = {"id": "h2-1-bbbbbb", "host": "h2", "follows": "10.0.0.1:7070"}
        part = report(place(2, is_ready=False), **common | changes)
        return health_of(seen(start_of(1), hosts=(head, part)))

    whole = with_part(ready=1)
    assert (whole.level, whole.n_ready, len(whole.seats)) == (Level.OK, 1, 1)
    assert said(with_part(state=HostState.STARTING)) == (
        "degraded",
        ["h2 is no part of the engine at 10.0.0.1:7070 yet: it loads or waits"],
    )
    ended = (place(2, is_ready=False, last_exit="killed by SIGKILL"),)
    assert said(with_part(places=ended))[1] == [
        "h2 is no part of the engine at 10.0.0.1:7070 yet: it ended (killed by SIGKILL) and is"
        " started again"
    ]
    assert with_part(state=HostState.IDLE).level is Level.OK


ENDED = {"pid": None, "is_ready": False, "last_exit": "killed by SIGKILL"}


def of_a_round(state: RoundState = RoundState.GENERATING) -> CurrentRound:
    record = RoundRecord("r", state, round_config(), 0.0)
    return CurrentRound(record, RoundRates({}, {}), [], OutboxStatus.of({}))


def replaced(
    *places: WorkerPlace,
    workers: tuple[WorkerRecord, ...] = (),
    state: RoundState = RoundState.GENERATING,
    **of_host: Any,
) -> str | None:
    overview = seen(*workers, hosts=(report(*places, **of_host),), round=of_a_round(state))
    return replacement(overview, health_of(overview).seats, NOW)


def test_a_round_goes_on_while_its_only_worker_is_being_replaced() -> None:
    ended = place(0, since=NOW - 5, **ENDED)
    assert replaced(ended) == (
        "The round continues when a worker is ready again: h1/gpu0 ended (killed by SIGKILL) and is"
        " started again."
    )
    loads = place(0, since=NOW - REPLACED_S, is_ready=False, last_exit="exit code 70")
    assert replaced(loads, workers=(start_of(0, "starting"),)) is not None
    for state in ("hung", "draining"):  # its supervisor has not seen its end yet
        assert replaced(place(0), workers=(start_of(0, state),)) is not None


@pytest.mark.parametrize(
    "why", ["late", "given up", "ready", "stopped round", "another model", "silent", "lone"]
)
def test_else_a_node_without_workers_has_failed(why: str) -> None:
    ended = place(0, since=NOW - 5, **ENDED)
    found = {
        "late": lambda: replaced(place(0, since=NOW - REPLACED_S - 1, **ENDED)),
        "given up": lambda: replaced(ended.model_copy(update={"gave_up": "5 times in a row"})),
        "ready": lambda: replaced(ended, place(1), workers=(start_of(1),)),
        "stopped round": lambda: replaced(ended, state=RoundState.STOPPED),
        "another model": lambda: replaced(ended, model="other"),
        "silent": lambda: replaced(place(0)),  # its process may stand still for ever
        "lone": lambda: replaced(workers=(start_of(0, "hung", host_id=""),)),
    }
    assert found[why]() is None


@pytest.mark.parametrize(
    ("model", "state", "level"),
    [
        ("other", RoundState.GENERATING, "degraded"),
        (MODEL, RoundState.GENERATING, "ok"),
        (None, RoundState.GENERATING, "ok"),  # the host has not reported its model yet
        ("other", RoundState.STOPPED, "ok"),
    ],
)
def test_a_round_whose_model_was_replaced_degrades(
    model: str | None, state: RoundState, level: str
) -> None:
    """It computed nothing, and health was ok for ten minutes."""
    hosts = (report(place(0), model=model),)
    health = health_of(seen(start_of(0), hosts=hosts, round=of_a_round(state)))
    text = f"the round's model {MODEL} has no worker: deploy the model again, or stop the round"
    assert said(health) == (level, [text] if level == "degraded" else [])
