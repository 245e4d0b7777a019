"""The memory of `proofline api`: what large bodies took goes back to the kernel."""

import subprocess
import sys

import pytest

# Blocks that a body of 33 MB and others of 0.1 MB take and leave, each beside a small one that
# stays, as a connection does. Prints what the process holds of them.
_BODIES = """
import sys
if sys.argv[1] == "as the API":
    from cli.run import api
    api._give_memory_back()

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

del_me = bytes(33_000_000)
del del_me
before = held()
bodies, kept = [], []
for _ in range(1000):
    bodies.append(b"x" * 100_000)
    kept.append(bytes(1000))
del bodies
print((held() - before) // 1_000_000)
"""


def _held_mb(how: str) -> int:
    command = [sys.executable, "-c", _BODIES, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_memory_of_ended_bodies_is_given_back() -> None:
    assert _held_mb("left alone") > 80  # of 100: else this tells nothing
    assert _held_mb("as the API") < 10
