"""What a user's type checker makes of the client, as it is installed."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import sync_client
from tests.harness.documents import ROOT

PROGRAM = """
from proofline.client import ArtifactParams, Client, GenerateBody

with Client("node:8000") as node:
    params = ArtifactParams(model="tiny-qwen3", seq_len=64)
    body = GenerateBody(block_hash="0xabc", public_key="node-1", nonces=[0], params=params)
    result = node.generate(body, on_progress=lambda done, total: print(done / total))
    reveal_type(result.artifacts)
    reveal_type(node.validate(body, result.artifacts).p_value)
    node.submit(7)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel is unpacked."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    if "hatchling" in done.stderr:
        pytest.skip("no package index from which pip gets what builds the wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("package", ["proofline", "poc_core"])
def test_the_wheel_says_that_it_is_typed(installed: Path, package: str) -> None:
    assert (installed / package / "py.typed").is_file()


@pytest.mark.slow
def test_a_users_program_is_checked_against_it(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": "", "PYTHONPATH": str(installed), "PATH": ""},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split(": ", 1)[1] for line in lines[:-1]] == [
        'note: Revealed type is "list[TypedDict(poc_core.schemes.artifact.requests.Artifact,'
        " {'nonce': int, 'vector_b64': str})]\"",
        'note: Revealed type is "float"',
        'error: Argument 1 to "submit" of "Client" has incompatible type "int"; expected'
        ' "BaseModel | Mapping[str, Any]"  [arg-type]',
    ]


def test_the_defaults_of_bodies_are_named() -> None:
    """Type checkers read them as `default=` alone (PEP 681), and would want each field else."""
    calls = [
        (path.name, call.lineno)
        for path in (ROOT / "poc_core/schemes").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Field" and call.args
    ]
    assert calls == []


def test_the_synchronous_client_is_of_the_asynchronous_one_as_it_is_now() -> None:
    assert sync_client.SYNC.read_text() == sync_client.generated(), "run `make format`"
