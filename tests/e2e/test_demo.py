"""`proofline demo`, what `make demo` runs."""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

from cli.supervise.processes import command_of_proofline, environment_of_proofline
from tests.harness.marks import needs_vllm
from tests.integration.processes import assert_all_gone, command_of, descendants

pytestmark = pytest.mark.integration

# After set-up, on 2 cores; and of CPU time, which beside other work is as much. That of the real
# engine is held by `make slow`, on a machine of whoever runs it.
LIMIT_S = 90.0


@pytest.fixture
def exits() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as exits:
        yield exits


@pytest.mark.parametrize(
    ("engine", "core"),
    [
        # What the real engine adds, a start and its proofs, `up` shows in `make test`.
        pytest.param("synthetic", "supervised-worker", id="synthetic"),
        pytest.param("vllm", "EngineCore", id="vllm", marks=[pytest.mark.slow, needs_vllm]),
    ],
)
def test_the_demo_shows_a_proof_and_a_fraud_and_leaves_nothing(
    engine: str, core: str, exits: contextlib.ExitStack
) -> None:
    set_by_user = ("POC_", "VLLM_", "OMP_")
    env = {
        name: value
        for name, value in environment_of_proofline({}).items()
        if not name.startswith(set_by_user)
    }
    # Not pytest's own, whose path is too long for a socket's.
    temporary = exits.enter_context(tempfile.TemporaryDirectory(prefix="demo-"))
    env["TMPDIR"] = temporary
    began = time.monotonic()
    demo = subprocess.Popen(
        command_of_proofline("demo", "--engine", engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    commands: set[str] = set()  # all that were seen: one that has just ended tells none
    cpu_s: dict[psutil.Process, float] = {}
    while demo.poll() is None and time.monotonic() - began < 250:
        for process in descendants(demo.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.add(command_of(process))
                cpu_s[process] = sum(process.cpu_times()[:2])
        time.sleep(0.2)
    demo.kill()
    output = demo.communicate()[0]
    seconds = time.monotonic() - began
    print(output, f"{seconds:.0f} s, {sum(cpu_s.values()):.0f} s of CPU time")
    assert demo.returncode == 0
    assert "no fraud" in output
    assert "fraud found" in output
    assert any(core in command for command in commands)
    assert_all_gone(list(cpu_s))
    assert [name for name in os.listdir(temporary) if "torchinductor" not in name] == []
    if engine == "vllm":
        assert sum(cpu_s.values()) < LIMIT_S
