"""Flower tells nothing to those without the password."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from flower import events
from kombu.utils import functional

from cli.supervise.redis_server import free_port
from workers.queue.app import create_app
from workers.queue.monitor import SteadyReceiver

LOOK = """
from types import SimpleNamespace
from flower.urls import handlers, settings
from tornado.web import HTTPError
from workers.queue import monitor

def answer(handler, user):
    try:
        handler.prepare(SimpleNamespace(
            get_current_user=lambda: user,
            application=SimpleNamespace(options=SimpleNamespace(basic_auth=["x"]))
        ))
    except HTTPError as error:
        return error.status_code

monitor.lock()
classes = [getattr(one, "handler_class", None) or one[1] for one in handlers]
classes.append(settings["static_handler_class"])
for user in (None, "user"):
    print(sorted({f"{answer(one, user)} {one.__name__ == 'Healthcheck'}" for one in classes}))
"""


def test_everything_but_the_health_check_wants_a_user() -> None:
    # In a process of its own, as it changes Flower itself.
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "['401 False', 'None True']",
        "['None False', 'None True']",
    ], done.stderr


def test_it_is_what_proofline_flower_runs() -> None:
    source = (Path(__file__).parents[4] / "cli/run/flower.py").read_text()
    assert '"workers.queue.monitor"' in source


class EnoughError(BaseException):
    """Ends Flower's thread, which catches every Exception."""


def test_it_soon_finds_a_redis_that_was_away_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 100:
            raise EnoughError

    monkeypatch.setattr(events, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(functional, "sleep", sleep)
    monkeypatch.setattr(functional, "time", lambda: sum(slept))
    monkeypatch.setattr(events, "EventReceiver", SteadyReceiver)
    app = create_app(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(EnoughError):
        events.Events(app, None, max_tasks_in_memory=1).run()
    assert max(slept) <= 10
