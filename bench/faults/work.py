"""The work of a stack in a campaign: jobs, validations, rounds and chat at once, all checked."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import httpx
from redis.exceptions import RedisError

from bench.faults.inside import Inside
from bench.harness.computed import Computed
from tests.peers.receiver import Payload, Receiver, unrepeated
from tests.stacks.round_client import RoundClient, round_body

PREFIX = "/api/v1/pow"
# Seconds after which a job that has not ended counts as lost.
JOB_TIMEOUT_S = 180.0
# Seconds between two looks at a job in Redis, which explain why it does not end.
_SLOW_S = 30.0
SLOW = f"jobs that took {_SLOW_S:g} s or more"
TIMEOUT_S = 30.0  # of one request
_AWAY_S = 60.0  # for which Redis or the API may be unavailable
_DELIVERY_S = 120.0  # until everything is delivered, after the last work was submitted
# Nonces of a round that are computed again at a time.
_PART = 512
ROUND_NONCES, ROUND_NONCES_AGAIN = "nonces of rounds", "nonces of rounds computed again"

Artifacts = list[dict[str, Any]]
Expected = Callable[[str, Sequence[int]], Artifacts]
"""Computes the right artifacts of a block hash and nonces."""
Same = Callable[[Artifacts, Artifacts], bool]


def printed_at(text: str) -> None:
    """Prints a text with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def undelivered(client: RoundClient) -> list[str]:
    """Waits until all callbacks are delivered; returns a problem if that takes too long."""
    try:
        client.wait(
            lambda: client.status()["callbacks_waiting"] == 0,
            _DELIVERY_S,
            "all callbacks delivered",
        )
    except AssertionError as error:
        return [str(error)]
    return []


class Work:
    """Threads that submit work and check the results, as a context manager.

    `problems` has a sentence for each wrong result. The end of the context waits for all work.
    """

    def __init__(
        self,
        client: Callable[[], httpx.Client],
        receiver: Receiver,
        expected: Expected,
        same: Same,
        seed: int,
        chat: bool,
        size: int,
        inside: Inside,
    ) -> None:
        """`client()` returns a client of the API. `size`: the most nonces of a job."""
        self._inside = inside
        self._happened: list[tuple[float, str]] = []  # time.monotonic() and description
        self._computed: dict[str, Computed] = {}  # by round id
        self._client = client
        self._receiver = receiver
        self._expected = expected
        self._same = same
        self._seed = seed
        self._size = size
        self._stop = threading.Event()
        kinds = [*[self._jobs] * 3, self._rounds, *[self._chat] * (2 if chat else 0)]
        self._threads = [
            threading.Thread(target=self._ended, args=(does, number), name=does.__name__)
            for number, does in enumerate(kinds)
        ]
        self._lock = threading.Lock()
        self._stops: list[float] = []  # times before and after each /stop
        self.problems: list[str] = []
        self.histories: list[str] = []  # of jobs that did not end in time
        self.counts: Counter[str] = Counter()
        self.waits_for_callback: dict[str, list[int]] = {}  # nonces by request_id

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)

    def happened(self, what: str) -> None:
        """Notes a fault or a round's end, which may explain why a job does not end."""
        with self._lock:
            self._happened.append((time.monotonic(), f"{time.strftime('%H:%M:%S')} {what}"))

    @property
    def progress(self) -> int:
        """Returns the number of nonces that clients have seen."""
        with self._lock:
            return self.counts["nonces of jobs"] + self.counts["nonces of rounds seen"]

    def _ended(self, does: Callable[[int], None], number: int) -> None:
        try:
            does(number)
        except Exception as error:  # a thread that has ended finds no further problems
            self.problem(f"the campaign's own {threading.current_thread().name} ended: {error!r}")

    def _jobs(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        with self._client() as http:
            while not self._stop.is_set():
                first, n = rng.randrange(10**6), rng.randint(1, self._size)
                nonces = list(range(first, first + n))
                size = rng.choice([1, 8, 32])
                body = round_body(None, nonces=nonces, batch_size=size, wait=False)
                if rng.random() < 0.3:
                    body["url"] = self._receiver.url
                wrong: set[int] = set()
                if rng.random() < 0.3:
                    claims = self._expected("block", nonces)
                    wrong = set(rng.sample(range(n), k=n // 10))
                    for place in wrong:
                        other = claims[place - 1]["vector_b64"]
                        claims[place] = claims[place] | {"vector_b64": other}
                    body["validation"] = {"artifacts": claims}
                submitted_at = time.monotonic()
                request_id = self._submit(http, body)
                if request_id is None:
                    time.sleep(0.2)
                    continue
                job = self._wait(http, request_id)
                stopped = any(at >= submitted_at for at in self._stops)
                if job["status"] == "cancelled" and stopped:
                    self.count("jobs cancelled by the end of a round")
                else:
                    self._check_job(request_id, nonces, wrong, body, job)

    def _submit(self, http: httpx.Client, body: dict[str, Any]) -> str | None:
        """Returns the id of the job; None if it was refused, or the answer got lost."""
        try:
            answer = http.post(f"{PREFIX}/generate", json=body)
        except httpx.HTTPError:
            self.count("submissions without an answer")
            return None
        if answer.status_code == 200:
            self.count("jobs accepted")
            return str(answer.json()["request_id"])
        self.count(f"submissions answered {answer.status_code}")
        # A round runs; too much work waits; Redis is unavailable.
        if answer.status_code not in (409, 429, 503):
            self.problem(f"a job was answered {answer.status_code} {answer.text[:200]}")
        return None

    def _wait(self, http: httpx.Client, request_id: str) -> dict[str, Any]:
        """Polls a job to its end; returns its last document, or a status of our own."""
        began, seen = time.monotonic(), 0
        looks: list[str] = []
        while (took_s := time.monotonic() - began) < JOB_TIMEOUT_S:
            if took_s >= _SLOW_S * (len(looks) + 1):
                looks.append(self._inside.of_job(request_id))
            try:
                answer = http.get(f"{PREFIX}/generate/{request_id}")
            except httpx.HTTPError:
                time.sleep(0.2)
                continue
            status = answer.status_code
            if status == 404:
                return {"status": "lost"}
            if status == 200:
                job: dict[str, Any] = answer.json()
                if job["status"] not in ("queued", "running"):
                    self.count(SLOW, int(took_s >= _SLOW_S))
                    return job
                done = job.get("n_done", 0)
                self.count("nonces of jobs", max(0, done - seen))
                seen = max(seen, done)
            elif status != 503:
                self.problem(f"job {request_id} was answered {status} {answer.text[:200]}")
            time.sleep(0.1)
        looks.append(self._inside.of_job(request_id))
        with self._lock:
            meanwhile = [what for at, what in self._happened if at >= began]
            self.histories.append("\n".join([f"job {request_id}:", *looks, *meanwhile]))
        return {"status": f"not ended within {JOB_TIMEOUT_S:g} s"}

    def _check_job(
        self,
        request_id: str,
        nonces: list[int],
        wrong: set[int],
        body: dict[str, Any],
        job: dict[str, Any],
    ) -> None:
        self.count("nonces of jobs", len(nonces))
        self.count(f"jobs {job['status']}")
        if job["status"] != "completed":
            self.problem(f"job {request_id} of {len(nonces)} nonces: {job}"[:400])
        elif "validation" in body:
            found, right = (job["n_mismatch"], job["n_total"]), (len(wrong), len(nonces))
            if found != right:
                self.problem(f"job {request_id}: (mismatches, nonces) {found} instead of {right}")
        elif not self._same(job["artifacts"], self._expected("block", nonces)):
            self.problem(f"job {request_id}: artifacts are missing, doubled or wrong")
        if "url" in body and "validation" not in body:
            self.waits_for_callback[request_id] = nonces

    def _rounds(self, _number: int) -> None:
        rng = random.Random(f"{self._seed}-rounds")
        with self._client() as http:
            client = RoundClient(http)
            for number in itertools.count(1):
                if self._stop.is_set():
                    return
                self.note_round()
                self._round(client, f"block-{number}", rng.uniform(5, 25))
                self._stop.wait(rng.uniform(2, 10))

    def _round(self, client: RoundClient, block_hash: str, seconds: float) -> None:
        body = round_body(self._receiver, block_hash=block_hash)
        if not self._insistent(client.http, "/init/generate", body):
            return
        self.count("rounds")
        self.happened(f"round of {block_hash} for {seconds:.0f} s")
        until, seen = time.monotonic() + seconds, 0
        while time.monotonic() < until and not self._stop.is_set():
            with suppress(httpx.HTTPError, AssertionError, KeyError):
                total = client.processed()
                self.count("nonces of rounds seen", max(0, total - seen))
                seen = max(seen, total)
            time.sleep(0.2)
        self._stops.append(time.monotonic())
        self._insistent(client.http, "/stop", {})
        self._stops.append(time.monotonic())
        self.happened(f"round of {block_hash} stopped")

    def _insistent(self, http: httpx.Client, path: str, body: dict[str, Any]) -> bool:
        """POSTs until the API accepts it, as the network does; returns False after _AWAY_S."""
        until = time.monotonic() + _AWAY_S
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                answer = http.post(f"{PREFIX}{path}", json=body)
                # 409: the round runs, and the answer to an earlier request got lost.
                is_begun = answer.status_code == 409 and path.startswith("/init")
                if answer.status_code == 200 or is_begun:
                    return True
                if answer.status_code != 503:
                    self.problem(f"{path} was answered {answer.status_code} {answer.text[:200]}")
            time.sleep(0.5)
        self.problem(f"{path} was not accepted within {_AWAY_S:g} s")
        return False

    def _chat(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-chat-{number}")
        body = {"model": "tiny-qwen3", "prompt": "the sea", "max_tokens": 16, "temperature": 0}
        with self._client() as http:
            while not self._stop.wait(rng.expovariate(1)):
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError:
                    self.count("chat without an answer")
                    continue
                self.count(f"chat {answer.status_code}")

    def note_round(self) -> None:
        """Notes what the last round has computed, before the node forgets it for another round."""
        until = time.monotonic() + _AWAY_S
        while time.monotonic() < until:
            try:
                if (found := self._inside.last_round()) is not None:
                    self._computed[found.round_id] = found
                return
            except RedisError:
                time.sleep(0.5)
        self.problem(f"Redis was unavailable for {_AWAY_S:g} s")

    def check_rounds(self, most_seconds: float) -> None:
        """Checks that each nonce that a round counts came once, with the right value.

        Values are computed again for at most `most_seconds`, in an order drawn by the seed.
        """
        self.note_round()
        by_round: dict[str, list[Payload]] = {}
        for payload in self._receiver.round_payloads():
            by_round.setdefault(payload.payload_id.rpartition("-")[0], []).append(payload)
        rng = random.Random(f"{self._seed}-check")
        parts: list[tuple[str, str, Artifacts]] = []  # round, block hash, some of its artifacts
        for round_id, payloads in by_round.items():
            try:
                taken = unrepeated(payloads)
            except AssertionError as error:
                self.problem(f"round {round_id}: {error}")
                continue
            artifacts = [artifact for payload in taken for artifact in payload.body["artifacts"]]
            nonces = [artifact["nonce"] for artifact in artifacts]
            self.count(ROUND_NONCES, len(nonces))
            computed = self._computed.get(round_id, Computed(round_id, 0, set()))
            for problem in computed.problems(nonces, range(2**62)):
                self.problem(problem)
            rng.shuffle(artifacts)
            block_hash = payloads[0].body["block_hash"]
            parts += [
                (round_id, block_hash, artifacts[start : start + _PART])
                for start in range(0, len(artifacts), _PART)
            ]
        rng.shuffle(parts)
        until = time.monotonic() + most_seconds
        for round_id, block_hash, artifacts in parts:
            if time.monotonic() > until:
                break
            nonces = [artifact["nonce"] for artifact in artifacts]
            if not self._same(artifacts, self._expected(block_hash, nonces)):
                self.problem(f"round {round_id}: wrong artifacts")
            self.count(ROUND_NONCES_AGAIN, len(nonces))

    def check_callbacks(self) -> None:
        """Checks that the receiver got the callback of every job with a url."""
        came = {payload.body.get("request_id"): payload for payload in self._receiver.taken()}
        for request_id, nonces in self.waits_for_callback.items():
            payload = came.get(request_id)
            if payload is None:
                self.problem(f"job {request_id}: its callback never came")
            elif payload.nonces != nonces:
                self.problem(f"job {request_id}: its callback has other nonces")
        self.count("callbacks of jobs", len(self.waits_for_callback))
