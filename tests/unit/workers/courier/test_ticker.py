"""The ticker offers due outboxes to the courier and writes its sign of life."""

import itertools
import logging
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import fakeredis
import pytest

from poc_core import life_signs
from poc_core.settings import Settings
from poc_core.state.outbox import LAST_BACKOFF_S, Outbox
from tests.harness.courier import Offers, Scene, tick
from tests.harness.documents import ROOT
from tests.harness.samples import Clock
from workers.courier import main as ticker_module
from workers.courier.courier import Courier
from workers.courier.main import Ticker


@pytest.mark.parametrize("worker_ttl_s", [30, 3600])
def test_a_sign_of_life_comes_twice_in_what_containers_wait_for_one(
    scene: Scene, offers: Offers, monkeypatch: pytest.MonkeyPatch, worker_ttl_s: int
) -> None:
    outbox = Outbox(scene.redis, Settings(worker_ttl_s=worker_ttl_s), Clock())
    compose = (ROOT / "compose.yaml").read_text()
    (minutes,) = re.findall(r"proofline-courier -mmin -(\d+)", compose)
    now = 0.0
    signs: list[float] = [0.0]
    monkeypatch.setattr(ticker_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ticker_module.life_signs, "show", lambda _: signs.append(now))
    ticker = Ticker(outbox, cast(Courier, offers))
    while now < 300:
        now += ticker_module.TICK_S
        tick(ticker)
    signs.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(signs)]
    assert max(gaps) <= 60 * int(minutes) / 2 + ticker_module.TICK_S


def test_what_is_due_is_offered_once(
    ticker: Ticker, offers: Offers, scene: Scene, tmp_path: Path
) -> None:
    for _ in range(3):
        tick(ticker)
    (due,) = offers.all
    assert (due.outbox_id, due.receiver, due.is_round) == (
        scene.record.round_id,
        "receiver:9000",
        True,
    )
    assert due.waiting_bytes > 0
    assert (tmp_path / "alive").exists()


def test_its_sign_of_life_ends_with_it(ticker: Ticker, tmp_path: Path) -> None:
    tick(ticker)
    assert (tmp_path / "alive").exists()
    ticker.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_sign_of_life_of_another_user_keeps_no_lock_from_being_renewed(
    ticker: Ticker, offers: Offers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ticker_module, "ALIVE", tmp_path / "of another" / "alive")
    tick(ticker)
    assert offers.renewed


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_planted_for_its_sign_of_life_is_not_followed(
    ticker: Ticker, offers: Offers, tmp_path: Path, is_there: bool
) -> None:
    target = tmp_path / "of root"
    if is_there:
        target.touch()
        os.utime(target, (1, 1))
    (tmp_path / "alive").symlink_to(target)
    tick(ticker)
    assert offers.renewed
    ticker.stop()
    assert target.exists() == is_there
    assert not is_there or target.stat().st_mtime == 1
    assert (tmp_path / "alive").is_symlink()


def test_its_sign_of_life_is_renewed_in_a_folder_of_its_own(
    ticker: Ticker, offers: Offers, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    alive.mkdir()  # of one that was killed
    os.utime(alive, (1, 1))
    tick(ticker)
    assert alive.stat().st_mtime > 1
    found = subprocess.run(["find", alive, "-mmin", "-1"], capture_output=True, check=True)
    assert found.stdout  # as the health checks of containers look
    ticker.stop()
    life_signs.show(ticker_module.ALIVE)
    assert alive.stat().st_mode & 0o777 == 0o700


def test_what_is_due_again_is_offered_again(ticker: Ticker, offers: Offers, scene: Scene) -> None:
    tick(ticker)
    scene.deliver()
    tick(ticker)
    assert len(offers.all) == 1
    scene.compute()
    scene.clock.now += LAST_BACKOFF_S
    tick(ticker)
    assert len(offers.all) == 2


def test_what_a_courier_that_died_was_offered_is_offered_again(
    ticker: Ticker, offers: Offers, scene: Scene
) -> None:
    tick(ticker)
    assert len(offers.all) == 1
    scene.clock.now += scene.outbox.lock_s
    tick(ticker)
    assert len(offers.all) == 2


def test_the_ticker_outlives_a_redis_that_is_away(
    ticker: Ticker,
    offers: Offers,
    scene: Scene,
    server: fakeredis.FakeServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    server.connected = False
    tick(ticker)
    assert "courier-ticker failed and is repeated" in caplog.text
    server.connected = True
    tick(ticker)
    assert offers.all


def test_the_ticker_outlives_a_mistake(
    ticker: Ticker, offers: Offers, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scene.outbox, "announce", lambda _: {"": 0}["a mistake"])
        tick(ticker)
    tick(ticker)
    assert offers.all
