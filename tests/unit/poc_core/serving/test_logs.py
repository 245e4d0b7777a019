"""Logs of our processes: what supervisors read stays readable, whatever a library does."""

import subprocess
import sys

from workers.engines import stages
from workers.vllm.start import log_patterns

PROGRAM = """
import logging
from poc_core.serving.logs import log_to_stderr
from workers.engines import stages

log_to_stderr()
# what model_hosting_container_standards does where vLLM 0.25.1's server imports it
logging.getLogger().setLevel(logging.ERROR)
for handler in logging.getLogger().handlers:
    handler.setLevel(logging.ERROR)
stages.begin("chat server")
logging.getLogger("celery.apps.worker").info("gpu0-08aded@vm ready.")
logging.getLogger("api.edge").warning("ours")
logging.getLogger("another.library").info("not asked for")
logging.getLogger("another.library").error("an error of another's")
"""


def test_a_library_that_silences_the_root_logger_hides_nothing_that_supervisors_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 4, done.stderr  # nothing twice
    begun, ready, ours, others = lines
    found = stages.BEGINS.search(begun)
    assert found is not None
    assert found[1] == "chat server"
    assert log_patterns.READY.search(ready)
    assert ours.endswith("WARNING/MainProcess] ours")
    assert others == "ERROR:another.library:an error of another's"
