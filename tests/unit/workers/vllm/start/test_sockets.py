"""The folder of vLLM's sockets: its own for each process, and no dead one's left."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.vllm.start.sockets import PREFIX, VARIABLE, Sockets

HOLDS = "from workers.vllm.start.sockets import Sockets; it = Sockets(); print(flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files; not pytest's own, whose path is too long for a socket's."""
    with tempfile.TemporaryDirectory(prefix="s-") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.delenv(VARIABLE, raising=False)
        yield Path(name)


def folders(place: Path) -> list[str]:
    return sorted(str(one) for one in place.iterdir())


@contextmanager
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has such a folder, until it is killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_vllm_is_told_a_folder_of_ours_until_it_is_removed(temporary: Path) -> None:
    sockets = Sockets()
    told = Path(os.environ[VARIABLE])
    assert [str(told)] == folders(temporary)
    assert (told.name.startswith(PREFIX), told.stat().st_mode & 0o777) == (True, 0o700)
    (told / "a-socket").touch()
    sockets.remove()
    sockets.remove()
    assert (folders(temporary), VARIABLE in os.environ) == ([], False)


def test_what_a_killed_process_left_goes_with_the_next_start(temporary: Path) -> None:
    with holder() as killed, holder() as alive:
        assert len(folders(temporary)) == 2
        killed.kill()
        killed.wait()
        Sockets().remove()
        assert len(folders(temporary)) == 1
        alive.kill()
        alive.wait()
        Sockets().remove()
        assert folders(temporary) == []


def test_a_folder_of_the_operators_is_kept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/run/mine")
    Sockets().remove()
    assert (os.environ[VARIABLE], folders(temporary)) == ("/run/mine", [])


def test_a_path_too_long_for_a_socket_is_left_to_vllm(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    Sockets()
    assert (VARIABLE in os.environ, folders(deep)) == (False, [])
