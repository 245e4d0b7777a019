"""Requests that may have ended an engine: what tells them apart, and who is blamed."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from api.chat import suspects
from api.chat.suspects import LostError, Trials, fingerprint
from tests.harness.samples import worker_record

PATH = b"/v1/chat/completions"
W1, W2 = worker_record("w1"), worker_record("w2")
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "allowed_token_ids": [5] * 2000,
}


def printed(asked: dict[str, Any], path: bytes = PATH) -> str:
    return fingerprint(path, json.dumps(asked, indent=len(asked)).encode())


def test_what_asks_an_engine_for_the_same_has_one_fingerprint() -> None:
    same = [
        printed(ASKED),
        printed(dict(reversed(ASKED.items()))),
        printed(ASKED | {"stream": True, "user": "another", "seed": 5}),
        printed(ASKED, PATH + b"?a=1"),
    ]
    assert len(set(same)) == 1


@pytest.mark.parametrize(
    "other",
    [printed(ASKED | {"n": 2}), printed(ASKED, b"/v1/completions"), fingerprint(PATH, b"no JSON")],
)
def test_what_asks_for_another_thing_has_another(other: str) -> None:
    assert other != printed(ASKED)


def lost(in_engine: bool = True) -> Callable[[], Any]:
    async def ask() -> None:
        raise LostError("lost", in_engine)

    return ask


async def answered() -> str:
    return "answer"


async def test_who_ends_an_engine_as_it_begins_is_blamed_alone() -> None:
    trials, poison, honest = Trials(), object(), object()
    assert await trials.begin(W1, honest, answered) == "answer"
    assert trials.blames(W1, honest)  # nobody else is known to have ended it
    with pytest.raises(LostError):
        await trials.begin(W1, poison, lost())
    assert trials.blames(W1, poison)
    assert not trials.blames(W1, honest)
    assert trials.blames(W2, honest)
    assert trials.blames(replace(W1, port=5), honest)  # the worker's next start


async def test_who_waits_behind_it_does_not_reach_that_engine() -> None:
    trials = Trials()
    with pytest.raises(LostError):
        await trials.begin(W1, object(), lost())
    with pytest.raises(LostError) as error:
        await trials.begin(W1, object(), answered)
    assert not error.value.in_engine


async def test_an_engine_that_was_gone_before_was_ended_by_nobody() -> None:
    trials, first = Trials(), object()
    with pytest.raises(LostError):
        await trials.begin(W1, first, lost(in_engine=False))
    assert await trials.begin(W1, object(), answered) == "answer"


async def test_suspects_begin_one_after_the_other_and_wait_no_longer_than_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects, "TRIAL_S", 0.01)
    trials, slow, release = Trials(), object(), asyncio.Event()
    order: list[str] = []

    async def goes_on() -> None:
        order.append("slow")
        await release.wait()

    task = asyncio.create_task(trials.begin(W1, slow, goes_on))
    await asyncio.sleep(0)
    assert not trials.blames(W1, object())
    order.append(await trials.begin(W1, object(), answered))
    assert order == ["slow", "answer"]
    release.set()
    await task
    assert await trials.begin(W1, object(), answered) == "answer"


async def test_a_client_that_leaves_keeps_no_place() -> None:
    trials = Trials()
    task = asyncio.create_task(trials.begin(W1, object(), asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    assert await trials.begin(W1, object(), answered) == "answer"
