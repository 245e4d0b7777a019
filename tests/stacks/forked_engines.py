"""vLLM's processes below a test's own, forked after importing vLLM, which takes 10 s of CPU.

Those of `up`, `workers` and other commands are spawned in tests too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

import pytest

from workers.vllm.start import lifeline

IMPORTED = [
    "tests.stacks.no_garbage",
    *(
        "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.executor.multiproc_executor",
    ),
    *(
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3",
        "vllm.model_executor.model_loader",
    ),
]


class ForkedProcess(context.ForkServerProcess):
    """A forked process with its starter's environment and end, as a spawned one has them."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        import setproctitle  # it comes with vLLM

        gc.freeze()  # what was imported stays to the end; our vLLM plugin turns the collector on
        # setproctitle finds its place by the environment with which the server was started.
        setproctitle.getproctitle()
        os.environ.clear()
        os.environ.update(self._environment)
        threading.Thread(target=end_with_parent, daemon=True).start()
        # Ranks come from the same server, which Python would not find in its processes.
        vars(forkserver._forkserver)["ensure_running"] = lambda: None  # noqa: SLF001
        with forked():
            super().run()


class ForkingContext(context.ForkServerContext):
    Process = ForkedProcess


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def forked() -> Iterator[None]:
    """Within: processes to be spawned are forked."""
    of_python = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return ForkingContext() if method == "spawn" else of_python(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_context)
        # The lifeline goes by parents, which here is the server.
        patch.setattr(lifeline, "hold", lambda: None)
        multiprocessing.set_forkserver_preload(IMPORTED)
        yield
