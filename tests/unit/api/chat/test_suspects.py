"""Requests that may have ended an engine: what tells them apart, and who is blamed."""

import asyncio
import json
from typing import Any

import pytest

from api.chat import suspects
from api.chat.suspects import Engine, LostError, fingerprint

PATH = b"/v1/chat/completions"
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


async def begins(engine: Engine, request: object, lost: bool | None = None) -> None:
    """In a trial; `lost`: whether the engine ended meanwhile, with the request in it."""
    async with engine.trial(request):
        if lost is not None:
            raise LostError("lost", in_engine=lost)


async def test_who_ends_an_engine_as_it_begins_is_blamed_alone() -> None:
    engine, poison, honest = Engine(), object(), object()
    await begins(engine, honest)
    assert not engine.was_ended_by_another(honest)  # nobody else is known to have
    with pytest.raises(LostError):
        await begins(engine, poison, lost=True)
    assert not engine.was_ended_by_another(poison)
    assert engine.was_ended_by_another(honest)


async def test_who_waits_behind_it_does_not_reach_that_engine() -> None:
    engine = Engine()
    with pytest.raises(LostError):
        await begins(engine, object(), lost=True)
    with pytest.raises(LostError) as error:
        await begins(engine, object())
    assert not error.value.in_engine


async def test_an_engine_that_was_gone_before_was_ended_by_nobody() -> None:
    engine = Engine()
    with pytest.raises(LostError):
        await begins(engine, object(), lost=False)
    await begins(engine, object())


async def test_suspects_begin_one_after_the_other_and_wait_no_longer_than_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects, "TRIAL_S", 0.01)
    engine, slow, release = Engine(), object(), asyncio.Event()

    async def goes_on() -> None:
        async with engine.trial(slow):
            await release.wait()

    task = asyncio.create_task(goes_on())
    await asyncio.sleep(0)
    assert engine.was_ended_by_another(object())  # if it ended now
    await begins(engine, object())
    assert not task.done()
    release.set()
    await task
    await begins(engine, object())


async def test_a_client_that_leaves_keeps_no_place() -> None:
    engine = Engine()

    async def waits() -> None:
        async with engine.trial(object()):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    await begins(engine, object())
