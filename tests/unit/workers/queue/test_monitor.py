"""Flower tells nothing to those without the password."""

import subprocess
import sys
from pathlib import Path

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
