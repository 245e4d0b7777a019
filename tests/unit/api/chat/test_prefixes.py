"""Which worker a conversation is sent to."""

import random
from collections import Counter
from typing import Any

import pytest

from api.chat.prefixes import NO_PREFIX, Prefix, PrefixMemory, prefix_of
from poc_core.records import WorkerRecord
from tests.harness.samples import worker_record

SYSTEM = {"role": "system", "content": "Answer kindly. " * 200}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **more: Any) -> Prefix:
    return prefix_of({"model": "m", "messages": messages} | more)


def workers(n: int) -> list[WorkerRecord]:
    return [worker_record(f"w{index}", "m") for index in range(n)]


class Router:
    """The memory as the gateway uses it."""

    def __init__(self, n: int) -> None:
        self.workers = workers(n)
        self.active: Counter[str] = Counter()
        self.memory = PrefixMemory()

    def send(self, prefix: Prefix) -> str:
        by_load = sorted(self.workers, key=lambda worker: self.active[worker.id])
        first = self.memory.order(prefix, by_load, self.active.__getitem__)[0].id
        self.memory.remember(prefix, first)
        return first


def test_a_turn_begins_with_the_blocks_of_the_turn_before() -> None:
    first = chat(SYSTEM, user("Hello"))
    second = chat(SYSTEM, user("Hello"), assistant("Hi"), user("And now?"), temperature=0.5)
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert second.opening == first.opening == len(first.blocks)
    assert second.shared == first.shared == len(first.blocks) - 1


def test_clients_whose_caches_are_their_own_share_no_beginning() -> None:
    mine, theirs = (chat(SYSTEM, user("Hello"), cache_salt=salt) for salt in ("a", "b"))
    assert not {*mine.blocks} & {*theirs.blocks}
    assert chat(SYSTEM, user("Hello"), user("More"), cache_salt="a").blocks[:-1] == mine.blocks
    prompts = [prefix_of({"prompt": "x" * 2000, "cache_salt": salt}) for salt in ("a", "b")]
    assert not {*prompts[0].blocks} & {*prompts[1].blocks}


@pytest.mark.parametrize(
    "other",
    [
        chat(SYSTEM, user("Hello!")),
        chat(user("Hello")),
        chat(SYSTEM, user("Hello"), tools=[{"type": "function"}]),
    ],
    ids=["another text", "no system prompt", "tools"],
)
def test_another_conversation_opens_otherwise(other: Prefix) -> None:
    prefix = chat(SYSTEM, user("Hello"))
    assert other.blocks[other.opening - 1] != prefix.blocks[prefix.opening - 1]


@pytest.mark.parametrize(
    "asked", [{}, {"messages": []}, {"messages": "x"}, {"prompt": 1}, {"input": "x"}], ids=str
)
def test_what_is_no_conversation_has_no_prefix(asked: dict[str, Any]) -> None:
    assert prefix_of(asked).blocks == NO_PREFIX.blocks


@pytest.mark.parametrize(
    "messages",
    [[None], ["text", 1], [{"role": ["user"]}], [{"content": "\ud800"}], [{"role": "user"}]],
)
def test_messages_that_vllm_will_refuse_are_sent_to_some_worker(messages: list[Any]) -> None:
    prefix = prefix_of({"messages": messages})
    assert Router(3).send(prefix) in ("w0", "w1", "w2")


def test_every_turn_goes_where_the_first_went() -> None:
    router = Router(4)
    for number in range(20):
        messages = [SYSTEM, user(f"Question {number}")]
        first = router.send(chat(*messages))
        for turn in range(7):
            messages += [assistant(f"Answer {turn}"), user(f"And {turn}?")]
            assert router.send(chat(*messages)) == first


@pytest.mark.parametrize("n_more", [1, 2, 3])
def test_a_turn_of_any_number_of_messages_goes_where_its_beginning_is(n_more: int) -> None:
    router = Router(4)
    messages = [SYSTEM, user("Hello")]
    (other, *_) = {"w0", "w1", "w2", "w3"} - {router.send(chat(*messages))}
    router.memory.remember(chat(*messages), other)
    assert router.send(chat(*messages, *[assistant("Hi")] * n_more)) == other


def test_conversations_that_share_a_system_prompt_are_spread() -> None:
    router = Router(4)
    counts = Counter(router.send(chat(SYSTEM, user(f"Question {n}"))) for n in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 50


def test_another_api_process_sends_a_conversation_to_the_same_worker() -> None:
    opening = [SYSTEM, user("Hello")]
    first = Router(4).send(chat(*opening))
    assert Router(4).send(chat(*opening, assistant("Hi"), user("And now?"))) == first


def test_a_long_text_with_another_question_goes_where_the_text_is() -> None:
    router = Router(4)
    document = " ".join(f"line {n}" for n in range(3000))
    first = router.send(chat(user(f"{document} What is in line 7?")))
    assert {router.send(chat(user(f"{document} And {n}?"))) for n in range(10)} == {first}


def test_a_completion_that_goes_on_stays() -> None:
    router = Router(4)
    text = " ".join(f"word {n}" for n in range(500))
    sent = {
        router.send(prefix_of({"prompt": text[:length]})) for length in range(1000, len(text), 500)
    }
    assert len(sent) == 1


def test_no_worker_holds_more_than_its_share() -> None:
    router = Router(4)
    prefix = chat(user("Hello"))
    for n in range(1, 201):
        router.active[router.send(prefix)] += 1
        assert max(router.active.values()) <= -(-5 * n // 16)  # 1.25 times the mean, rounded up


def test_requests_fewer_than_workers_have_one_each() -> None:
    router = Router(4)
    for _ in range(3):
        router.active[router.send(chat(user("Hello")))] += 1
    assert sorted(router.active.values()) == [1, 1, 1]


def test_a_worker_that_goes_moves_the_conversations_of_no_other() -> None:
    router = Router(4)
    conversations = [[SYSTEM, user(f"Question {n}")] for n in range(100)]
    before = [router.send(chat(*messages)) for messages in conversations]
    router.workers = router.workers[1:]
    for first, messages in zip(before, conversations, strict=True):
        now = router.send(chat(*messages, assistant("Well."), user("And?")))
        assert now == first if first != "w0" else now != "w0"


def test_all_workers_are_in_the_order_the_least_busy_after_the_first() -> None:
    router = Router(3)
    router.active.update({"w0": 1, "w1": 1, "w2": 0})
    by_load = [router.workers[2], router.workers[0], router.workers[1]]
    prefix = chat(user("Hello"))
    router.memory.remember(prefix, "w1")
    order = router.memory.order(prefix, by_load, router.active.__getitem__)
    # 1.25 times a mean of 1, rounded up, leaves the holder a place.
    assert [worker.id for worker in order] == ["w1", "w2", "w0"]


def test_without_a_prefix_the_order_is_that_of_the_load() -> None:
    router = Router(3)
    assert router.memory.order(NO_PREFIX, router.workers, lambda _: 0) == router.workers


def test_the_oldest_beginnings_are_forgotten() -> None:
    memory = PrefixMemory(size=8)
    rng = random.Random(1)
    for _ in range(100):
        memory.remember(chat(user(str(rng.random()))), "w1")
    assert len(memory) == 8
