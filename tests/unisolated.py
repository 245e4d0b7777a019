"""A worker on a build whose KV isolation is switched off, to show that the tests of chat beside proofs can fail.

Nothing outside tests/ knows of it: a worker gets it only by running this module in the place of `proofline`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.vllm.extension import ProofExtension

_ROOT = Path(__file__).resolve().parent.parent


class UnisolatedExtension(ProofExtension):
    """Proofs write into chat's own cache, from block 1 up, as the public implementations do."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        runner._caches.bound = _chats_own
        return runner


@contextmanager
def _chats_own(n_sequences: int, seq_len: int) -> Iterator[None]:
    yield


def command(proofline: list[str]) -> list[str]:
    """The command of a worker, with the isolation of its engine switched off."""
    python, flags, arguments = proofline[0], ["-P", "-c"], proofline[proofline.index("supervised-worker") :]
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); import tests.unisolated; tests.unisolated.main()"
    return [python, *flags, code, *arguments]


def main() -> None:
    from cli.main import app
    from workers.vllm import engine as vllm

    vllm._EXTENSION = "tests.unisolated.UnisolatedExtension"
    app(prog_name="proofline")
