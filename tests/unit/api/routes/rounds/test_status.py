"""`/status` reports a round."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.rounds import RoundStore
from tests.harness.round_routes import POW, URL, compute, start, status
from tests.harness.samples import MODEL, Clock, distance_body, known, round_body

pytestmark = pytest.mark.usefixtures("a_worker")

SECRET_URL = "http://user:s3cret@receiver:9000/poc"


def test_the_states_are_those_of_the_protocol(client: TestClient) -> None:
    seen = [status(client)["state"]]
    for path, sent in [
        ("init", distance_body()),
        ("phase/generate", {}),
        ("phase/validate", {}),
        ("stop", None),
        ("init/generate", round_body()),
        ("stop", None),
    ]:
        assert client.post(f"{POW}/{path}", json=sent).status_code == 200
        answer = status(client)
        # In the network's words a round that was stopped is none.
        wanted = "IDLE" if answer["state"] == "STOPPED" else answer["state"]
        assert answer["status"] == wanted
        assert client.get("/api/v1/state").json()["poc_status"] == wanted
        seen.append(answer["state"])
    assert seen == ["IDLE", "IDLE", "GENERATING", "VALIDATING", "STOPPED", "GENERATING", "STOPPED"]


@pytest.mark.parametrize(
    ("sent", "added"),
    [
        (round_body(url=URL, node_id=1, node_count=2, batch_size=16), {"poc_stronger_rng": False}),
        (
            distance_body(callback_url=URL, batch_size=16, fraud_threshold=0.05),
            {"model": MODEL, "use_sign_flips": True, "use_layer_hooks": False},
        ),
        (
            distance_body(
                callback_url=URL, batch_size=16, fraud_threshold=0.05, use_layer_hooks=True
            ),
            {"model": MODEL, "use_sign_flips": False},
        ),
    ],
    ids=["artifacts", "distances", "of layer hooks"],
)
def test_the_status_shows_a_rounds_config_in_its_own_words(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any], added: dict[str, Any]
) -> None:
    start(client, rounds, sent)
    assert status(client)["config"] == sent | {"group_id": 0, "n_groups": 1} | added


def test_the_status_counts_per_worker_and_in_sum(
    client: TestClient, rounds: RoundStore, clock: Clock, serve: Callable[..., Any]
) -> None:
    serve("w2")
    start(client, rounds)
    clock.now += 15
    compute(rounds, 20, "w1")
    compute(rounds, 10, "w2")
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["total_processed"], stats["elapsed_seconds"]) == (30, 20)
    assert (stats["nonces_per_second"], stats["nonces_per_second_of_round"]) == (3.0, 1.5)
    assert stats["workers"] == {
        "w1": {"total_processed": 20, "nonces_per_second": 2.0},
        "w2": {"total_processed": 10, "nonces_per_second": 1.0},
    }


def test_the_status_names_excluded_nonces(client: TestClient, rounds: RoundStore) -> None:
    start(client, rounds)
    compute(rounds, 3, values=["a", None, "c"])
    stats = status(client)["stats"]
    assert (stats["n_excluded"], stats["excluded_nonces"]) == (1, [1])


def test_the_status_tells_what_is_delivered_and_what_waits(
    client: TestClient, rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(client, rounds, round_body(url=URL))
    compute(rounds, 4)
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    outbox.delivered(delivery)
    compute(rounds, 3)
    stats = status(client)["stats"]
    assert (stats["artifacts_delivered"], stats["artifacts_waiting"]) == (4, 3)
    assert stats["outbox"]["full"] is False
    assert stats["outbox"]["limit_bytes"] == settings.outbox_max_bytes


def test_the_status_tells_of_a_receiver_that_fails(
    client: TestClient, rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(client, rounds, round_body(url=URL))
    compute(rounds, 4)
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    wait_s = outbox.failed(delivery, "it answered 500")
    told = status(client)["stats"]["outbox"]
    assert (told["failures"], told["last_error"], told["dropped"]) == (1, "it answered 500", 0)
    assert told["next_try_at"] == pytest.approx(clock.now + wait_s)


@pytest.mark.parametrize(
    "sent", [round_body(url=SECRET_URL), distance_body(callback_url=SECRET_URL)]
)
def test_a_callback_urls_secret_is_in_no_answer(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any]
) -> None:
    assert start(client, rounds, sent).config.url == SECRET_URL
    for path in (f"{POW}/status", "/api/v1/inference/pow/status", "/metrics"):
        assert "s3cret" not in client.get(path).text
    assert "http://***@receiver:9000/poc" in status(client)["config"].values()


def test_the_status_names_receivers_that_do_not_answer(
    client: TestClient, redis: Redis, clock: Clock, settings: Settings
) -> None:
    assert status(client)["silent_receivers"] == []
    for _ in range(BREAKS_AT):
        Receivers(redis, clock).silent("receiver:9000")
    ((told),) = status(client)["silent_receivers"]
    assert (told["receiver"], told["failures"]) == ("receiver:9000", BREAKS_AT)
    assert clock.now < told["next_try_at"] <= clock.now + 2


class TestWithFewBytes:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(outbox_max_bytes=1024)

    def test_the_status_says_that_the_outbox_is_full(
        self, client: TestClient, rounds: RoundStore
    ) -> None:
        start(client, rounds, round_body(url=URL))
        compute(rounds, 40)
        told = status(client)["stats"]["outbox"]
        assert told["bytes"] > told["limit_bytes"] == 1024
        assert told["full"] is True


def test_the_status_tells_why_a_round_stopped_by_itself(
    client: TestClient, rounds: RoundStore
) -> None:
    rounds.switch(start(client, rounds), RoundState.STOPPED, "The model has no layers.")
    answer = status(client)
    assert (answer["state"], answer["stats"]["error"]) == ("STOPPED", "The model has no layers.")


def test_the_clock_of_a_stopped_round_stands_and_it_has_no_rate_of_now(
    client: TestClient, rounds: RoundStore, clock: Clock
) -> None:
    start(client, rounds)
    compute(rounds, 30)
    clock.now += 10
    client.post(f"{POW}/stop")
    stats = status(client)["stats"]
    assert (stats["nonces_per_second"], stats["workers"]["w1"]["nonces_per_second"]) == (0, 0)
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["elapsed_seconds"], stats["nonces_per_second_of_round"]) == (10, 3.0)


def test_a_round_that_never_ran_has_not_lasted(client: TestClient, clock: Clock) -> None:
    client.post(f"{POW}/init", json=distance_body())
    clock.now += 5
    client.post(f"{POW}/stop")
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["elapsed_seconds"], stats["nonces_per_second_of_round"]) == (0, 0)


def test_the_status_of_a_distance_round_has_its_fields_beside(
    client: TestClient, rounds: RoundStore, clock: Clock
) -> None:
    before = status(client)
    assert {before[name] for name in ("total_checked", "elapsed_seconds", "rate_per_second")} == {0}
    start(client, rounds, distance_body())
    compute(rounds, 4, values=[1.39, 1.5, 1.41, 1.25])
    clock.now += 2
    answer = status(client)
    assert (answer["valid_nonces"], answer["valid_distances"]) == ([0, 3], [1.39, 1.25])
    assert (answer["total_checked"], answer["total_valid"], answer["r_target"]) == (4, 2, 1.405)
    assert (answer["elapsed_seconds"], answer["rate_per_second"]) == (2, 2.0)


def test_the_status_of_a_distance_round_does_not_grow_without_end(
    client: TestClient, rounds: RoundStore
) -> None:
    record = start(client, rounds, distance_body())
    for _ in range(25):
        compute(rounds, 1000, values=[1.25] * 1000)
    answer = status(client)
    assert (len(answer["valid_nonces"]), len(answer["valid_distances"])) == (10_000, 10_000)
    assert (answer["valid_from"], answer["total_valid"]) == (15_000, 25_000)
    assert answer["valid_nonces"][-1] == 24_999
    assert rounds.reported(record.round_id).first == 15_000


def test_what_the_status_does_not_list_is_had_page_by_page(
    client: TestClient, rounds: RoundStore
) -> None:
    start(client, rounds, distance_body())
    compute(rounds, 8, values=[1.39, 1.5, 1.41, 1.25, 1.2, 1.6, 1.1, 1.0])
    found, at = [], 0
    while at < status(client)["total_valid"]:
        answer = client.get(f"{POW}/status", params={"valid_from": at, "valid_limit": 2}).json()
        assert answer["valid_from"] == at
        found += list(zip(answer["valid_nonces"], answer["valid_distances"], strict=True))
        at += len(answer["valid_nonces"])
    assert found == [(0, 1.39), (3, 1.25), (4, 1.2), (6, 1.1), (7, 1.0)]


def test_the_last_possible_page_is_empty(client: TestClient, rounds: RoundStore) -> None:
    start(client, rounds, distance_body())
    compute(rounds, 1, values=[1.25])
    answer = client.get(f"{POW}/status", params={"valid_from": 2**53 - 1}).json()
    assert (answer["valid_from"], answer["valid_nonces"]) == (2**53 - 1, [])


@pytest.mark.parametrize(
    "query",
    [
        *("valid_from=-1", "valid_from=x", "valid_from=1e9", f"valid_from={2**53}"),
        *("valid_limit=10001", "valid_limit=0"),
    ],
)
def test_422_for_a_page_that_cannot_be(client: TestClient, query: str) -> None:
    answer = client.get(f"{POW}/status?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", query.split("=")[0]]


def test_the_status_says_that_a_sequence_has_ended(client: TestClient, rounds: RoundStore) -> None:
    start(client, rounds, round_body(node_count=2**62))
    assert status(client)["stats"]["exhausted"] is False
    compute(rounds, 4, values=["a", "b"])
    answer = status(client)
    assert answer["state"] == "STOPPED"
    assert (answer["stats"]["exhausted"], answer["stats"]["total_processed"]) == (True, 2)
    assert client.get("/api/v1/inference/pow/status").json()["status"] == "IDLE"


def test_the_status_before_any_round_has_every_field_that_it_has_after(
    client: TestClient, rounds: RoundStore
) -> None:
    before = status(client)
    assert (before["state"], before["config"]) == ("IDLE", None)
    for sent in (round_body(), distance_body()):
        start(client, rounds, sent)
        after = status(client)
        assert after.keys() <= before.keys()
        assert after["stats"].keys() == before["stats"].keys()
        assert after["stats"]["outbox"].keys() == before["stats"]["outbox"].keys()
        assert ("valid_nonces" in after) is ("r_target" in sent)
        client.post(f"{POW}/stop")
