"""Jobs through API, Redis, Celery and two workers. Synthetic engines: this is about the way,
not about the numbers.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from poc_core.queues import model_queue
from poc_core.state import keys
from tests.harness.waiting import wait_until
from tests.integration.node import Node, synthetic_artifacts, tampered

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("node")]

# Batches of a job that outlasts what a test does beside it, and is cancelled then: on two workers
# 15 s, as each takes 50 ms and has no room for another.
LONG_BATCHES = 600
LONG: dict[str, Any] = {"nonces": range(32 * LONG_BATCHES), "batch_size": 32}
# Nonces of a job that waits until all batches of LONG are leased: fewer nonces would pass it in the
# line (join_line in common.lua).
BEHIND_LONG = range(50_000, 56_400)


class TestGenerate:
    def test_with_wait_answers_with_the_artifacts_in_the_order_of_the_nonces(
        self, node: Node
    ) -> None:
        nonces = [2**63 - 1, 7, 0, *range(100, 180), 2**53 + 1]
        answer = node.generate(nonces, wait=True, batch_size=4)
        assert answer.status_code == 200, answer.text
        assert answer.json()["artifacts"] == synthetic_artifacts(nonces)

    def test_without_wait_has_the_same_result(self, node: Node) -> None:
        result = node.result(node.submit(range(50), batch_size=3))
        assert result["artifacts"] == synthetic_artifacts(range(50))

    def test_spreads_over_all_workers_of_its_model(
        self, node: Node, redis_of: Callable[[Node], Redis]
    ) -> None:
        workers = {worker["id"] for worker in node.status()["workers"]}
        request_id = node.submit(**LONG)
        redis: Any = redis_of(node)
        seen: set[str] = set()

        def all_hold_a_lease() -> bool:
            seen.update(
                lease.decode().split("|")[0]
                for lease in redis.hvals(f"poc:job:{request_id}:leases")
            )
            return seen == workers

        wait_until(all_hold_a_lease, f"batches of one job on each of {workers}", pause_s=0.01)
        node.cancel(request_id)


class TestValidate:
    def test_tampered_artifacts_are_a_fraud_and_named(self, node: Node) -> None:
        artifacts, changed = tampered(synthetic_artifacts(range(64)), every=4)
        answer = node.generate(
            range(64), wait=True, batch_size=8, validation={"artifacts": artifacts}
        )
        verdict = answer.json()
        assert (verdict["mismatch_nonces"], verdict["fraud_detected"]) == (changed, True), verdict

    def test_without_wait_has_its_verdict_fetched(self, node: Node) -> None:
        artifacts, changed = tampered(synthetic_artifacts(range(64)), every=4)
        verdict = node.result(node.submit(range(64), validation={"artifacts": artifacts}))
        assert (verdict["n_mismatch"], verdict["fraud_detected"]) == (len(changed), True), verdict

    @pytest.mark.parametrize(
        ("stat_test", "fraud"),
        [
            ({"p_mismatch": 0.001}, True),
            ({"p_mismatch": 0.5}, False),
            ({"dist_threshold": 2.1}, False),
            ({"p_mismatch": 0.05, "fraud_threshold": 0.5}, True),
            ({"p_mismatch": 0.05, "p_value_threshold": 0.5}, False),
            ({"p_mismatch": 0.05, "fraud_threshold": 0.01}, False),
        ],
        ids=str,
    )
    def test_stat_test_decides_what_a_fraud_is(
        self, node: Node, stat_test: Any, fraud: bool
    ) -> None:
        artifacts, _ = tampered(synthetic_artifacts(range(64)), every=16)
        answer = node.generate(
            range(64), wait=True, validation={"artifacts": artifacts}, stat_test=stat_test
        )
        assert answer.json()["fraud_detected"] is fraud, answer.text


class TestStatus:
    def test_counts_each_nonce_once(self, node: Node) -> None:
        before = node.status()["stats"]["total_processed"]
        node.result(node.submit(range(300), batch_size=7))
        assert node.status()["stats"]["total_processed"] - before == 300


class TestStop:
    def test_cancels_what_is_queued_and_not_what_runs(self, node: Node) -> None:
        running = node.submit(**LONG)
        node.wait_progress(running)
        queued = node.submit(BEHIND_LONG)
        answer = node.stop()
        assert answer.json() == {
            "status": "OK",
            "pow_status": {"status": "STOPPED"},
            "cancelled_jobs": 1,
        }
        assert [node.job(request_id)["status"] for request_id in (running, queued)] == [
            "running",
            "cancelled",
        ]
        node.cancel(running)
        assert node.job(running)["status"] == "cancelled"
        assert node.status()["queued_nonces"] == 0

    def test_leaves_no_messages_of_what_it_cancels(
        self, node: Node, redis_of: Callable[[Node], Redis]
    ) -> None:
        redis: Any = redis_of(node)
        wait_until(lambda: redis.llen(model_queue("tiny-qwen3")) == 0, "no messages of others")
        running = node.submit(**LONG)
        node.wait_progress(running)
        node.submit(BEHIND_LONG, batch_size=1)
        # One for each worker at most, however many batches wait.
        assert redis.llen(model_queue("tiny-qwen3")) <= 2 * redis.zcard("poc:workers")
        assert node.stop().json()["cancelled_jobs"] == 1
        assert redis.llen(model_queue("tiny-qwen3")) == 0
        node.cancel(running)

    def test_lets_a_job_run_whose_client_waits(
        self, node: Node, redis_of: Callable[[Node], Redis]
    ) -> None:
        redis: Any = redis_of(node)
        running = node.submit(**LONG)
        node.wait_progress(running)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(node.generate, range(64), wait=True)
            wait_until(
                lambda: redis.zcard("poc:jobs:active:tiny-qwen3") == 2, "the job in the queue"
            )
            assert node.stop().json()["cancelled_jobs"] == 0
            node.cancel(running)
            assert waiting.result(300).json()["artifacts"] == synthetic_artifacts(range(64))


class TestEndOfAJob:
    def test_leaves_no_key_in_redis_without_ttl(
        self, node: Node, redis_of: Callable[[Node], Redis]
    ) -> None:
        node.result(node.submit(range(20)))
        redis = redis_of(node)

        def eternal() -> set[str]:
            return {key.decode() for key in redis.scan_iter("poc:*") if redis.ttl(key) == -1}

        # Lists of messages that wait are Celery's own: empty ones do not exist. What the node shall
        # run stays for ever. The last message is acknowledged after the job's end.
        wait_until(lambda: eternal() == {keys.DEPLOYMENT}, "the end of the last message")
