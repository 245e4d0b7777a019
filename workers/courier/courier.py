"""Delivers callback payloads from outboxes in Redis to their receivers."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.exceptions import RedisError

from poc_core.callbacks import redacted
from poc_core.state.outbox import Delivery, Due, Outbox, OutboxExpiredError, Receivers
from workers.courier.poster import DEADLINE_S, End, Poster, Result
from workers.patience import until_redis_answers

# Deliveries at a time. Hanging receivers of jobs cannot take the places of rounds.
ROUND_PLACES = 16
JOB_PLACES = 48
# The most places for one receiver, and the largest share of places for one host on all ports.
RECEIVER_PLACES = 4
HOST_SHARE = 0.5
# Payload bytes in memory, for rounds and for jobs each. A single payload may exceed this.
MOST_BYTES = 128 * 1024 * 1024


class Places:
    """A queue of outboxes for one event loop. Starts a delivery when the limits allow it: the
    number of deliveries in progress (in total, per receiver, per host), and their bytes.
    """

    def __init__(
        self, deliver: Callable[[str], Coroutine[Any, Any, None]], largest_payload: int
    ) -> None:
        """`largest_payload`: maximum bytes of a round's payload. A job's payload has no maximum."""
        self._deliver = deliver
        self._largest_payload = largest_payload
        self._waiting: dict[str, Due] = {}  # in the order of their arrival
        self._under_way: dict[str, Due] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = True  # until `close` begins

    def offer(self, due: Due) -> None:
        """Queues an outbox unless it is queued. On the loop's thread only. An outbox that is being
        delivered is delivered again, because new values may have come after that delivery's end.
        """
        self._waiting.setdefault(due.outbox_id, due)
        self._start()

    async def close(self, timeout_s: float) -> None:
        """Starts no more deliveries. Waits `timeout_s` for those in progress, then cancels them."""
        self.is_open = False
        tasks = list(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        if not self.is_open:
            return
        used: Counter[tuple[object, ...]] = Counter()
        for due in self._under_way.values():
            used.update({key: n for key, n, _ in self._needs(due)})
        for due in list(self._waiting.values()):
            if due.outbox_id in self._under_way:
                continue
            needs = self._needs(due)
            if all(not used[key] or used[key] + n <= most for key, n, most in needs):
                used.update({key: n for key, n, _ in needs})
                self._under_way[due.outbox_id] = self._waiting.pop(due.outbox_id)
                task = asyncio.ensure_future(self._run(due))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _needs(self, due: Due) -> Sequence[tuple[tuple[object, ...], int, float]]:
        """Returns (key, amount, maximum) for each limit against which a delivery counts. `amount`:
        how much this delivery adds.
        """
        kind, size = due.is_round, due.waiting_bytes
        places = ROUND_PLACES if kind else JOB_PLACES
        return (
            (("places", kind), 1, places),
            (("receiver", kind, due.receiver), 1, RECEIVER_PLACES),
            (("host", kind, due.receiver.rpartition(":")[0]), 1, HOST_SHARE * places),
            (("bytes", kind), min(size, self._largest_payload) if kind else size, MOST_BYTES),
        )

    async def _run(self, due: Due) -> None:
        try:
            await self._deliver(due.outbox_id)
        finally:
            del self._under_way[due.outbox_id]
            self._start()


logger = logging.getLogger(__name__)

# Seconds after which an outbox gives its place to another outbox.
TURN_S = 30.0
# Threads that call Redis and assemble payloads. Each needs memory for several payloads.
_REDIS_THREADS = 4

T = TypeVar("T")


class Courier:
    """Delivers payloads on one event loop, so that a hanging receiver blocks no thread."""

    def __init__(
        self,
        outbox: Outbox,
        receivers: Receivers,
        poster: Poster,
        max_retries: int | None = None,
        largest_payload: int = 8 * 1024 * 1024,
    ) -> None:
        """`max_retries`: maximum number of tries per payload; None means no limit.
        `largest_payload`: maximum bytes of a round's payload.
        """
        self._outbox = outbox
        self._receivers = receivers
        self._poster = poster
        self._max_retries = max_retries
        self._on_their_way: dict[str, Delivery] = {}  # deliveries in progress by token
        self._places = Places(self.deliver, largest_payload)
        self._redis_threads = ThreadPoolExecutor(_REDIS_THREADS, "courier-redis")
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Delivers while the context is open. On exit, waits for the tries in progress."""
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="courier-loop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            self._redis_threads.shutdown(wait=False, cancel_futures=True)

    def offer(self, due: Due) -> None:
        """Queues an outbox for delivery and returns at once. Any thread may call it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._places.offer, due)

    def renew_locks(self) -> None:
        """Renews the locks that keep other couriers from repeating the deliveries in progress."""
        for delivery in list(self._on_their_way.values()):
            self._outbox.renew(delivery)

    async def deliver(self, outbox_id: str) -> None:
        """Delivers an outbox's due payloads for about TURN_S seconds. Logs errors."""
        until = time.monotonic() + TURN_S
        try:
            while self._places.is_open and time.monotonic() < until:
                delivery = await self._with_redis(lambda: self._outbox.take(outbox_id))
                if delivery is None or not await self._try(delivery):
                    return
        except OutboxExpiredError as error:
            logger.error("%s", error)
        except RedisError as error:
            logger.warning("could not deliver %s: %s", outbox_id, error)
        except Exception:
            logger.exception("could not deliver %s", outbox_id)  # other outboxes continue

    async def _try(self, delivery: Delivery) -> bool:
        """Sends a payload and records the result. Returns True if the next payload may follow."""
        self._on_their_way[delivery.token] = delivery
        try:
            result = await self._poster.post(delivery)
            return await self._with_redis(lambda: self._end(delivery, result))
        finally:
            del self._on_their_way[delivery.token]

    def _end(self, delivery: Delivery, result: Result) -> bool:
        payload_id = delivery.payload_id
        # Repeated until Redis answers, so that the receiver does not get the payload again.
        if result.end is End.TAKEN and not until_redis_answers(
            lambda: self._outbox.delivered(delivery)
        ):
            logger.warning(
                "payload %s was delivered late; its receiver may see it again", payload_id
            )
        if result.end is End.SILENT:
            until_redis_answers(lambda: self._receivers.silent(delivery.receiver))
        elif result.end is not End.FORBIDDEN:
            until_redis_answers(lambda: self._receivers.answered(delivery.receiver))
        if result.end is End.TAKEN:
            return True
        if result.end is End.TOO_LARGE and until_redis_answers(
            lambda: self._outbox.halved(delivery, result.said)
        ):
            logger.warning(
                "payload %s is too large and goes in halves: %s", payload_id, result.details
            )
            return True
        tries, details = delivery.failures + 1, f"{redacted(delivery.url)}: {result.details}"
        if result.end is End.GONE:
            logger.error("payload %s and all later payloads are dropped: %s", payload_id, details)
            until_redis_answers(lambda: self._outbox.gone(delivery, result.said))
            return False
        if self._max_retries is not None and tries >= self._max_retries:
            logger.error("payload %s is dropped after %d tries: %s", payload_id, tries, details)
            until_redis_answers(lambda: self._outbox.dropped(delivery, result.said))
            return False
        wait_s = until_redis_answers(
            lambda: self._outbox.failed(delivery, result.said, result.retry_after_s)
        )
        logger.warning(
            "payload %s not delivered (try %d, next in %.1f s): %s",
            payload_id,
            tries,
            wait_s,
            details,
        )
        return False

    async def _close(self) -> None:
        await self._places.close(DEADLINE_S + 1)
        await self._poster.close()

    async def _with_redis(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._redis_threads, step)
