"""A worker whose KV isolation can be switched off, to show that tests of chat can fail.

Nothing outside tests/ knows of it: this module is run in the place of `proofline`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.vllm.extension import ProofExtension

_ROOT = Path(__file__).resolve().parents[2]


# Names the file that switches isolation off while it exists.
SWITCH = "PROOFLINE_TEST_UNISOLATED"


class UnisolatedExtension(ProofExtension):
    """Proofs may write into chat's own cache, from block 1 up, as in public implementations."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        isolated = type(runner._caches).bound.__get__(runner._caches)

        def bound(n_sequences: int, seq_len: int) -> Any:
            return (_chats_own if os.path.exists(os.environ[SWITCH]) else isolated)(
                n_sequences, seq_len
            )

        runner._caches.bound = bound
        return runner


@contextmanager
def _chats_own(n_sequences: int, seq_len: int) -> Iterator[None]:
    yield


def command(
    proofline: list[str], extension: str = "tests.planted.unisolated.UnisolatedExtension"
) -> list[str]:
    """The command of a worker whose engine has UnisolatedExtension."""
    python, flags, arguments = (
        proofline[0],
        ["-P", "-c"],
        proofline[proofline.index("supervised-worker") :],
    )
    start = f"import tests.planted.unisolated; tests.planted.unisolated.main({extension!r})"
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); {start}"
    return [python, *flags, code, *arguments]


def main(extension: str) -> None:
    from cli.main import app
    from workers.vllm.start import launch

    launch.EXTENSION = extension
    app(prog_name="proofline")
