"""What a stack does in a campaign: jobs, validations, rounds and chat at once, all checked."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from redis.exceptions import RedisError

from bench.faults.inside import Inside
from tests.peers.receiver import Payload, Receiver, unrepeated
from tests.stacks.computed import Computed
from tests.stacks.round_client import RoundClient, round_body

PREFIX = "/api/v1/pow"
# Seconds within which a job ends, whatever happens: else it is lost.
JOB_TIMEOUT_S = 180.0
# Seconds after which a job is looked at, again and again: should it never end, that says why.
_SLOW_S = 30.0
SLOW = f"jobs that took {_SLOW_S:g} s or more"
TIMEOUT_S = 30.0  # of one request
_AWAY_S = 60.0  # for which Redis or the API may be away
_DELIVERY_S = 120.0  # until everything is delivered, after the last work was submitted
# Nonces of a round that are computed again at a time.
_PART = 512
ROUND_NONCES, ROUND_NONCES_AGAIN = "nonces of rounds", "nonces of rounds computed again"
_AWAY = (httpx.HTTPError,)

Artifacts = list[dict[str, Any]]
Expected = Callable[[str, Sequence[int]], Artifacts]
"""The right artifacts of a block hash and nonces."""
Same = Callable[[Artifacts, Artifacts], bool]


def undelivered(client: RoundClient) -> list[str]:
    """Waits until all callbacks are delivered; returns the problem if they are not in time."""
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
    """Threads that submit and check until they are told to stop; `problems` are what they find."""

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
        """`client()`: one of the node's API. `size`: nonces of the largest job."""
        self._inside = inside
        self._happened: list[tuple[float, str]] = []  # when, by time.monotonic, and what
        self._computed: dict[str, Computed] = {}  # by round id
        self._client = client
        self._receiver = receiver
        self._expected = expected
        self._same = same
        self._seed = seed
        self._size = size
        self._stop = threading.Event()
        kinds: list[tuple[str, Callable[[int], None], int]] = [
            ("jobs", self._jobs, 3),
            ("rounds", self._rounds, 1),
        ]
        kinds += [("chat", self._chat, 2)] if chat else []
        self._threads = [
            threading.Thread(target=self._ended, args=(does, number), name=f"{name}-{number}")
            for name, does, n in kinds
            for number in range(n)
        ]
        self._lock = threading.Lock()
        self._stops: list[float] = []  # when a /stop was sent, and answered
        self.problems: list[str] = []
        self.histories: list[str] = []  # of jobs that did not end in time
        self.counts: Counter[str] = Counter()
        self.waits_for_callback: dict[str, list[int]] = {}  # request_id: nonces

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets all work under way end and be checked."""
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
        """Notes what may be why a job does not end: a fault, a round's end."""
        with self._lock:
            self._happened.append((time.monotonic(), f"{time.strftime('%H:%M:%S')} {what}"))

    @property
    def progress(self) -> int:
        """A number that rises with every nonce that a client could see."""
        with self._lock:
            return self.counts["nonces of jobs"] + self.counts["nonces of rounds seen"]

    def _ended(self, does: Callable[[int], None], number: int) -> None:
        try:
            does(number)
        except Exception as error:  # a thread that is no more finds no problems either
            self.problem(f"the campaign's own {threading.current_thread().name} ended: {error!r}")

    def _jobs(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        with self._client() as http:
            while not self._stop.is_set():
                first, n = rng.randrange(10**6), rng.randint(1, self._size)
                nonces = list(range(first, first + n))
                body = round_body(
                    None, nonces=nonces, batch_size=rng.choice([1, 8, 32]), wait=False
                )
                if rng.random() < 0.3:
                    body["url"] = self._receiver.url
                wrong: set[int] = set()
                if rng.random() < 0.3:
                    claims = self._expected("block", nonces)
                    wrong = set(rng.sample(range(n), k=n // 10))
                    for place in wrong:
                        claims[place] = claims[place] | {
                            "vector_b64": claims[place - 1]["vector_b64"]
                        }
                    body["validation"] = {"artifacts": claims}
                submitted_at = time.monotonic()
                request_id = self._submit(http, body)
                if request_id is not None:
                    job = self._wait(http, request_id)
                    if job["status"] == "cancelled" and any(
                        at >= submitted_at for at in self._stops
                    ):
                        self.count("jobs cancelled by the end of a round")
                    else:
                        self._check_job(request_id, nonces, wrong, body, job)

    def _submit(self, http: httpx.Client, body: dict[str, Any]) -> str | None:
        """The id of the job; None when it was not accepted, or nobody can say."""
        try:
            answer = http.post(f"{PREFIX}/generate", json=body)
        except _AWAY:
            self.count("submissions without an answer")
            time.sleep(0.2)
            return None
        if answer.status_code == 200:
            self.count("jobs accepted")
            return str(answer.json()["request_id"])
        self.count(f"submissions answered {answer.status_code}")
        if answer.status_code not in (409, 429, 503):  # a round runs; too much; Redis is away
            self.problem(f"a job was answered {answer.status_code} {answer.text[:200]}")
        time.sleep(0.2)
        return None

    def _wait(self, http: httpx.Client, request_id: str) -> dict[str, Any]:
        began, seen = time.monotonic(), 0
        looks: list[str] = []
        while (took_s := time.monotonic() - began) < JOB_TIMEOUT_S:
            if took_s >= _SLOW_S * (len(looks) + 1):
                looks.append(self._inside.of_job(request_id))
            try:
                answer = http.get(f"{PREFIX}/generate/{request_id}")
            except _AWAY:
                time.sleep(0.2)
                continue
            if answer.status_code == 404:
                return {"status": "lost"}
            if answer.status_code == 200:
                job: dict[str, Any] = answer.json()
                if job["status"] not in ("queued", "running"):
                    self.count(SLOW, int(took_s >= _SLOW_S))
                    return job
                done = job.get("n_done", 0)
                self.count("nonces of jobs", max(0, done - seen))
                seen = max(seen, done)
            elif answer.status_code not in (503,):
                self.problem(
                    f"job {request_id} was answered {answer.status_code} {answer.text[:200]}"
                )
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
            if (job["n_mismatch"], job["n_total"]) != (len(wrong), len(nonces)):
                told = f"{job['n_mismatch']} of {job['n_total']}"
                self.problem(
                    f"job {request_id}: {told} mismatches instead of {len(wrong)} of {len(nonces)}"
                )
        elif not self._same(job["artifacts"], self._expected("block", nonces)):
            self.problem(f"job {request_id}: artifacts are missing, doubled or wrong")
        if "url" in body and "validation" not in body:
            self.waits_for_callback[request_id] = nonces

    def _rounds(self, _number: int) -> None:
        rng = random.Random(f"{self._seed}-rounds")
        number = 0
        with self._client() as http:
            client = RoundClient(http)
            while not self._stop.is_set():
                number += 1
                self.note_round()
                self._round(client, f"block-{number}", rng.uniform(5, 25))
                self._stop.wait(rng.uniform(2, 10))

    def _round(self, client: RoundClient, block_hash: str, seconds: float) -> None:
        body = round_body(self._receiver, block_hash=block_hash)
        if self._insistent(client.http, "/init/generate", body) is None:
            return
        self.count("rounds")
        self.happened(f"round of {block_hash} for {seconds:.0f} s")
        until, seen = time.monotonic() + seconds, 0
        while time.monotonic() < until and not self._stop.is_set():
            try:
                total = client.processed()
                self.count("nonces of rounds seen", max(0, total - seen))
                seen = max(seen, total)
            except (*_AWAY, AssertionError, KeyError):
                pass
            time.sleep(0.2)
        self._stops.append(time.monotonic())
        self._insistent(client.http, "/stop", {})
        self._stops.append(time.monotonic())
        self.happened(f"round of {block_hash} stopped")

    def _insistent(
        self, http: httpx.Client, path: str, body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """POSTs until the API accepts it, as an aggregator does."""
        until = time.monotonic() + _AWAY_S
        while time.monotonic() < until:
            try:
                answer = http.post(f"{PREFIX}{path}", json=body)
            except _AWAY:
                time.sleep(0.5)
                continue
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
            # The answer got lost: the round runs.
            if answer.status_code == 409 and path.startswith("/init"):
                return {}
            if answer.status_code != 503:
                self.problem(f"{path} was answered {answer.status_code} {answer.text[:200]}")
            time.sleep(0.5)
        self.problem(f"{path} was not taken within {_AWAY_S:g} s")
        return None

    def _chat(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-chat-{number}")
        body = {"model": "tiny-qwen3", "prompt": "the sea", "max_tokens": 16, "temperature": 0}
        with self._client() as http:
            while not self._stop.wait(rng.expovariate(1)):
                try:
                    answer = http.post("/v1/completions", json=body)
                except _AWAY:
                    self.count("chat without an answer")
                    continue
                self.count(f"chat {answer.status_code}")

    def note_round(self) -> None:
        """Notes what the last round has computed: the node forgets one that another follows."""
        until = time.monotonic() + _AWAY_S
        while time.monotonic() < until:
            try:
                if (found := self._inside.last_round()) is not None:
                    self._computed[found.round_id] = found
                return
            except RedisError:
                time.sleep(0.5)
        self.problem(f"Redis was away for {_AWAY_S:g} s")

    def check_rounds(self, most_seconds: float) -> None:
        """Each nonce that a round counts came once and right; none is missing that was computed.

        Values are computed again for `most_seconds`: all, or as many as that allows, drawn by the
        seed.
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
            for start in range(0, len(artifacts), _PART):
                parts.append(
                    (round_id, payloads[0].body["block_hash"], artifacts[start : start + _PART])
                )
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
        """Checks that every job with a url came to its receiver."""
        came = {payload.body.get("request_id"): payload for payload in self._receiver.taken()}
        for request_id, nonces in self.waits_for_callback.items():
            payload = came.get(request_id)
            if payload is None:
                self.problem(f"job {request_id}: its callback never came")
            elif payload.nonces != nonces:
                self.problem(f"job {request_id}: its callback has other nonces")
        self.count("callbacks of jobs", len(self.waits_for_callback))
