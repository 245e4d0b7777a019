"""Child processes under a supervisor, without an engine."""

import re
import sys
import threading
from typing import Any

from cli.supervise.processes import Child, ChildSpec
from tests.harness.waiting import wait_until

LIMIT_S = 60.0


def test_a_child_is_restarted_although_its_log_is_still_being_read() -> None:
    """The log's disk is slow, so lines arrive while the last error line is searched."""
    is_searched, is_read = threading.Event(), threading.Event()
    said: list[str] = []

    def file(_name: str, line: str) -> None:
        if line == "second":
            is_read.set()
        assert is_searched.wait(LIMIT_S)

    class Telling:
        def search(self, _line: str) -> None:
            is_searched.set()
            assert is_read.wait(LIMIT_S)

    telling: Any = Telling()
    program = "print('first'); print('second'); raise SystemExit(1)"
    command = [sys.executable, "-c", program]
    spec = ChildSpec("one", command, ready_line=re.compile("never"), telling=telling)
    child = Child(spec, file, said.append)
    child.start()
    wait_until(lambda: said, "the supervisor reports the end")
    child.stop()
    assert "restarting it in 1 s" in said[0]
