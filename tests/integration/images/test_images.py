"""Each Dockerfile's steps done in roots of its own; then the chart's pods run from what was built.

Downloads what a build downloads. Needs root and mmdebstrap (`apt-get install mmdebstrap`).
"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.sbom import hashes_in
from tests.cluster import pods
from tests.cluster.chart import objects
from tests.cluster.jobs import assert_a_job_is_computed
from tests.cluster.pods import Cluster
from tests.cluster.secrets import secrets_in
from tests.harness.compose_file import ROOT
from tests.images.build import Builder
from tests.images.dockerfile import Image

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not pods.possible() or shutil.which("mmdebstrap") is None,
        reason="needs root, namespaces and mmdebstrap",
    ),
    pytest.mark.xdist_group("images"),
]
START_S = 300.0
ENGINE_ARGS = ["--max-model-len", "512", "--enforce-eager"]
SBOM = "usr/share/proofline/sbom.cdx.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gigabytes, which go with the test."""
    made = tmp_path_factory.mktemp("images")
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def builder(folder: Path) -> Builder:
    return Builder(folder / "roots")


def built(builder: Builder, name: str) -> Image:
    return builder.build(ROOT / "docker" / f"{name}.Dockerfile", {"VERSION": "1.2.3"})


@pytest.fixture(scope="module")
def api(builder: Builder) -> Image:
    return built(builder, "api")


@pytest.fixture(scope="module")
def worker(builder: Builder) -> Image:
    return built(builder, "worker-cpu")


def components(image: Image) -> dict[str, str]:
    """Name and version of each package that the image says it has."""
    document = json.loads((image.root / SBOM).read_text())
    assert document["bomFormat"] == "CycloneDX"
    return {one["name"]: one["version"] for one in document["components"]}


def test_the_apis_image_has_its_lock_and_nothing_else(api: Image) -> None:
    locked = {tuple(pin.split("==")) for pin in hashes_in((ROOT / "locks/api.txt").read_text())}
    found = components(api)
    others = {name for name, version in found.items() if (name, version) not in locked}
    assert others - {"setuptools"} == {"pip", "proofline"}  # Python 3.11 brings setuptools
    assert {"fastapi", "celery", "flower", "redis"} <= found.keys()
    assert "torch" not in found


def test_a_second_build_is_the_same(api: Image, builder: Builder, folder: Path) -> None:
    """File by file, all that our own steps made."""
    first = folder / "first"
    shutil.move(api.root, first)
    try:
        again = built(builder, "api")
        assert contents(first) == contents(again.root)
    finally:
        shutil.rmtree(api.root)
        shutil.move(first, api.root)


def contents(root: Path) -> dict[str, bytes]:
    found = {}
    for top in ("opt/venv", "usr/share/proofline", "home", "keys"):
        for path in (root / top).rglob("*"):
            if path.is_symlink():
                found[str(path.relative_to(root))] = str(path.readlink()).encode()
            elif path.is_file():
                found[str(path.relative_to(root))] = path.read_bytes()
    assert len(found) > 1000
    return found


def test_a_node_runs_from_its_images(api: Image, worker: Image, folder: Path) -> None:
    """Read-only, as the image's user, with the health that image and chart ask for."""
    found = objects(
        {
            "workers": [
                {"name": "cpu", "gpus": 0, "model": "tiny-qwen3", "engineArgs": ENGINE_ARGS}
            ],
            "flower": {"enabled": True},
        }
    )
    secrets = secrets_in(folder)
    images = {"proofline-api": api, "proofline-worker-cpu": worker}
    for image in images.values():
        assert image.user == "proofline"
        assert f"proofline:x:{pods.USER}:" in (image.root / "etc/passwd").read_text()
    with Cluster(found, secrets, folder / "pods", images) as cluster:
        for name in ("redis", "api", "courier", "flower", "worker-cpu"):
            cluster.start(name)
            for probe in ("startupProbe", "readinessProbe"):
                cluster.wait(name, probe, START_S)
        for name, image in (("api", api), ("worker-cpu", worker)):
            asked = cluster.inside(name, image.health)
            assert asked.returncode == 0, asked.stderr
        assert_a_job_is_computed(cluster)
        for name in ("worker-cpu", "api", "courier", "flower"):
            assert set(cluster.stop(name).values()) == {0}


def test_the_image_for_gpus_takes_its_steps_on_a_base_without_vllm(builder: Builder) -> None:
    """So far as there is no vllm/vllm-openai here: requirements, wheel, user, its own command."""
    image = built(builder, "worker-gpu")
    assert components(image)["proofline"] == VERSION
    assert "vllm" not in components(image)
    assert image.user == "proofline"
    assert image.labels["org.opencontainers.image.version"] == "1.2.3"
