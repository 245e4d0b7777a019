"""What images are made of, without building one: bases, users, health, labels, lists of packages.

tests/integration/images/test_images.py does the Dockerfiles' steps.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.sbom import bom_of, hashes_in
from tests.harness import compose_file
from tests.harness.compose_file import ROOT
from tests.images.dockerfile import Instruction, Stage, flags, pairs, stages, words

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOW = ROOT / ".github" / "workflows" / "images.yml"
BY_FILE = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
# Of compose.yaml, that run the image as its own command says.
SERVICE = {"api": "api", "worker-cpu": "worker", "worker-gpu": "worker-gpu"}


def final(path: Path) -> Stage:
    return stages(path.read_text())[-1]


def last(stage: Stage, name: str) -> str:
    return [one.text for one in stage.instructions if one.name == name][-1]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


@BY_FILE
def test_bases_are_one_release_and_may_be_given_to_the_byte(path: Path) -> None:
    bases = {stage.base for stage in stages(path.read_text())}
    bases -= {stage.name for stage in stages(path.read_text())}
    python, *others = sorted(bases)
    assert python == "python:3.12-slim-bookworm"
    assert all(re.fullmatch(r"vllm/vllm-openai:v[\d.]+", other) for other in others)
    digest = f"python:3.12-slim-bookworm@sha256:{64 * 'a'}"
    assert stages(path.read_text(), {"PYTHON": digest})[0].base == digest


@BY_FILE
def test_an_image_asks_its_health_as_compose_does(path: Path) -> None:
    if name_of(path) == "node":
        pytest.skip("stands in the network's own Compose files")
    given, command = flags(last(final(path), "HEALTHCHECK"))
    composed = compose_file.services()[SERVICE[name_of(path)]]["healthcheck"]
    assert ["CMD", *words(command.removeprefix("CMD "))] == composed["test"]
    asked = {key.replace("-", "_"): value for key, value in given}
    assert asked == {key: str(composed[key]) for key in asked}
    assert {"interval", "timeout", "start_period", "start_interval"} <= asked.keys()


@BY_FILE
def test_an_image_says_what_it_is(path: Path) -> None:
    labels = pairs(last(final(path), "LABEL"))
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"proofline-{name_of(path)}"
    assert labels[f"{prefix}licenses"] == "MIT"
    assert {f"{prefix}{key}" for key in ("description", "version", "revision")} <= labels.keys()


@BY_FILE
def test_an_image_lists_its_packages_last(path: Path) -> None:
    """After the last install, with the hashes of the lock that it was installed from."""
    runs = [one.text for one in final(path).instructions if one.name == "RUN"]
    assert "/sbom/sbom.py" in runs[-1]
    installed = re.findall(r"--require-hashes -r /?(locks/[\w-]+\.txt)", path.read_text())
    told = re.findall(r" /(locks/[\w-]+\.txt)", runs[-1])
    assert told == [lock for lock in installed if lock != "locks/sbom.txt"]


def test_instructions_of_others_are_no_surprise() -> None:
    with pytest.raises(ValueError, match="ADD is no instruction"):
        stages("FROM a\nADD b c\n")
    with pytest.raises(ValueError, match="RUN stands before FROM"):
        stages("RUN a\n")


def test_a_dockerfile_is_taken_apart() -> None:
    text = (
        "# said first\nARG V=1\nFROM a:$V AS b\n"
        "RUN --mount=type=bind,from=x,source=/y,target=/z \\\n"
        '    # not said\n    one \\\n    && two\nFROM b\nCMD ["a b", "c"]\n'
    )
    first, second = stages(text, {"V": "2"})
    assert (first.base, first.name) == ("a:2", "b")
    (run,) = first.instructions
    mount, command = flags(run.text)
    assert mount == [("mount", "type=bind,from=x,source=/y,target=/z")]
    assert command == "one && two"
    assert second == Stage("b", "final", (Instruction("CMD", '["a b", "c"]'),))
    assert words(last(second, "CMD")) == ["a b", "c"]


class Package(Distribution):
    """An installed package that is not there."""

    def __init__(self, name: str, version: str, licence: str) -> None:
        self._text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        self._text += f"License-Expression: {licence}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


class TestSbom:
    LOCK = f"a-b==1.0 \\\n    --hash=sha256:{64 * '1'} \\\n    --hash=sha256:{64 * '2'}\nc==2\n"
    FOUND = (Package("A_B", "1.0", "MIT OR Apache-2.0"), Package("c", "2", "BSD-3-Clause"))

    def test_each_package_has_its_name_version_licence_and_hashes(self) -> None:
        document = json.loads(bom_of("image", self.FOUND, hashes_in(self.LOCK)))
        first, second = document["components"]
        assert first["purl"] == "pkg:pypi/a-b@1.0"
        assert first["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
        assert [one["content"] for one in first["hashes"]] == [64 * "1", 64 * "2"]
        assert second["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
        assert "hashes" not in second
        assert document["metadata"]["component"]["type"] == "container"

    def test_the_same_packages_give_the_same_text(self) -> None:
        one = bom_of("image", self.FOUND, {})
        assert one == bom_of("image", self.FOUND[::-1], {})
        assert one != bom_of("image", self.FOUND[:1], {})

    @pytest.mark.slow
    def test_it_lists_what_is_installed_here(self) -> None:
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "sbom.py"), "here"],
            capture_output=True,
            text=True,
            check=True,
        )
        names = [one["name"] for one in json.loads(done.stdout)["components"]]
        assert {"fastapi", "proofline", "cyclonedx-python-lib"} <= set(names)
        assert len(names) == len(set(names))


def test_the_workflow_is_one_and_builds_every_image() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.github-workflows", str(WORKFLOW)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["image"]
    assert job["strategy"]["matrix"]["image"] == [name_of(path) for path in DOCKERFILES]
    (build,) = (one for one in job["steps"] if "build-push-action" in one.get("uses", ""))
    given = {line.partition("=")[0] for line in build["with"]["build-args"].splitlines()}
    for path in DOCKERFILES:
        known = set(re.findall(r"^ARG (\w+)", path.read_text(), flags=re.MULTILINE))
        assert given <= known
