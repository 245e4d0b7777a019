"""The Dockerfiles, checked without Docker."""

import re
import tomllib
from typing import Any

import pytest

from scripts.requirements import requirements
from tests.harness import compose_file
from tests.harness.commands import COMMANDS
from tests.harness.compose_file import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfiles:
    def test_what_they_copy_exists_and_is_sent_to_the_engine(self, path: Any) -> None:
        copied = re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), flags=re.MULTILINE)
        sources = [word for line in copied for word in line.split()[:-1]]
        assert sources
        sent = {
            line.removeprefix("!")
            for line in (ROOT / ".dockerignore").read_text().splitlines()
            if line[0] == "!"
        }
        for source in sources:
            assert (ROOT / source).exists(), source
            assert {source, source.split("/")[0]} & sent, source

    def test_they_install_a_lock_with_hashes_or_what_vllms_own_image_lacks(self, path: Any) -> None:
        text = path.read_text()
        locks = re.findall(r"pip install --no-deps --require-hashes -r (\S+)", text)
        of_vllm = re.findall(r"pip install .*-r \S*requirements\.txt", text)
        assert (locks, len(of_vllm)) == {
            "api": (["locks/api.txt"], 0),
            "node": (["locks/worker-cpu.txt"], 1),
            "worker-cpu": (["locks/worker-cpu.txt"], 0),
            "worker-gpu": ([], 1),
        }[path.name.partition(".")[0]]

    def test_torch_is_only_where_an_engine_is(self, path: Any) -> None:
        with_engine = ("node.Dockerfile", "worker-cpu.Dockerfile")
        assert ("constraints-cpu.txt" in path.read_text()) == (path.name in with_engine)

    def test_the_builds_own_backend_is_kept_and_is_pyprojects(self, path: Any) -> None:
        """Fetched again with each change of our code it was most of a rebuild."""
        backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        (stage,) = (part for part in path.read_text().split("FROM ") if "AS wheel" in part)
        assert re.findall(r'pip install [^"]*"(.+)"', stage) == backend
        assert stage.index("pip install") < stage.index("COPY")
        assert "--no-build-isolation" in stage

    def test_a_change_of_our_code_installs_no_dependency_anew(self, path: Any) -> None:
        """Dependencies are installed before our packages are there, and those without
        dependencies.
        """
        text = path.read_text()
        stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
        for stage in stages:
            if installs := re.search(r"-r \S+\.txt", stage):
                before = stage[: installs.start()]
                assert not re.search(
                    r"^COPY (api|cli|workers|poc_core)\b", before, flags=re.MULTILINE
                )
        assert len(re.findall(r"pip install .*--no-deps /wheels/", text)) == 1

    def test_they_do_not_run_as_root(self, path: Any) -> None:
        if path.name == "node.Dockerfile":
            pytest.skip("docker/node.sh chooses the user: tests/unit/docker/test_node.py")
        assert re.findall(r"^USER (\w+)$", path.read_text(), flags=re.MULTILINE)[-1] == "proofline"

    def test_what_they_run_exists(self, path: Any) -> None:
        image = compose_file.dockerfile_commands(path)
        assert image["ENTRYPOINT"][-1] == "proofline"
        assert image["CMD"][0] in COMMANDS.commands


def test_a_worker_without_a_gpu_brings_no_triton() -> None:
    assert "triton" not in (ROOT / "locks" / "worker-cpu.txt").read_text()


def test_an_unknown_extra_is_an_error() -> None:
    with pytest.raises(KeyError):
        requirements(["nope"])
