"""Turns of the event loop: who takes little does not wait behind who takes much."""

import asyncio
import itertools
import time

import pytest

from poc_core.fair_queue import Tags, Turns


def test_who_takes_little_is_next_whenever_it_comes() -> None:
    tags = Tags()
    for _ in range(5):
        tags.spend("greedy", 100)
    tags.spend("modest", 1)
    assert tags.of("modest") < tags.of("greedy")
    assert tags.of("new") < tags.of("greedy")


def test_who_was_away_gets_nothing_for_that() -> None:
    tags = Tags()
    tags.spend("away", 1)
    for _ in range(10):
        tags.spend("there", 1)
    assert tags.of("away") == tags.of("there") - 1  # its next is no earlier than now


def test_clients_are_forgotten() -> None:
    tags = Tags()
    for number in range(5000):
        tags.spend(f"client {number}", 1)
        tags.spend("regular", 1)
    assert len(vars(tags)["_ends"]) <= 1001


async def test_nobody_waits_while_nobody_else_does_and_little_was_let_go_on() -> None:
    turns = Turns(budget=10)
    with pytest.raises(StopIteration):  # it returns before the loop has a turn
        turns.wait("one", 9).send(None)
    second = turns.wait("one", 9)  # too much for one round
    assert isinstance(second.send(None), asyncio.Future)
    second.close()
    await asyncio.wait_for(turns.wait("one", 9), 60)


async def served(turns: Turns, n_greedy: int) -> list[str]:
    """The order in which work of two clients goes on, where one asks for much before."""
    order: list[str] = []

    async def work(client: str, cost: int) -> None:
        await turns.wait(client, cost)
        order.append(client)

    greedy = [asyncio.create_task(work("greedy", 10)) for _ in range(n_greedy)]
    await asyncio.sleep(0)
    await work("modest", 1)
    await asyncio.gather(*greedy)
    return order


async def test_one_that_takes_little_waits_for_a_round_or_two() -> None:
    order = await served(Turns(budget=10), 100)
    assert len(order) == 101
    assert order.index("modest") <= 3


async def test_between_two_rounds_the_loop_does_what_else_there_is() -> None:
    turns = Turns(budget=10)
    done: list[int] = []
    work = [asyncio.create_task(turns.wait("greedy", 10)) for _ in range(20)]
    for number, one in enumerate(work):
        one.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
    seen = []
    while len(done) < 20:
        await asyncio.sleep(0)
        seen.append(len(done))
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2
    assert done == sorted(done)


async def test_more_goes_on_in_a_round_that_takes_long_by_itself() -> None:
    turns = Turns(budget=1, per_s=100)
    done: list[int] = []
    for number in range(20):
        one = asyncio.create_task(turns.wait("one", 1))
        one.add_done_callback(lambda _, number=number: done.append(number))  # type: ignore[misc]
    await asyncio.sleep(0)
    time.sleep(0.06)  # the loop has much else to do
    for _ in range(4):  # of which one at a time would be four
        await asyncio.sleep(0)
    assert len(done) >= 6
    while len(done) < 20:
        await asyncio.sleep(0)


async def test_who_leaves_takes_nobodys_turn() -> None:
    turns = Turns(budget=1)
    await turns.wait("first", 1)
    waiting = [asyncio.create_task(turns.wait(f"{number}", 1)) for number in range(5)]
    await asyncio.sleep(0)
    for one in waiting[:4]:
        one.cancel()
    await asyncio.wait_for(waiting[4], 60)
