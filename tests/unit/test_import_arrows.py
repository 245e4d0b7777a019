"""Imports point one way (docs/architecture.md): api -> poc_core <- workers; vLLM in workers/."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("arrows")  # one process reads all modules

ROOT = Path(__file__).resolve().parents[2]

# Packages that the node never imports.
TEST_CODE = {"tests", "bench", "lab", "pytest", "fakeredis"}
SERVERS, QUEUES = {"fastapi", "starlette", "uvicorn"}, {"celery", "kombu"}
ENGINES = {"vllm", "transformers"}
# What each package must not import, also inside a function.
FORBIDDEN = {
    "api": {"workers", "cli", "proofline", "torch"} | ENGINES | TEST_CODE,
    "poc_core": {"api", "workers", "cli", "proofline"} | SERVERS | QUEUES | ENGINES | TEST_CODE,
    "workers": {"api", "cli", "proofline", "fastapi", "typer"} | TEST_CODE,
    "proofline": {"api", "workers", "cli", "redis", "torch", "numpy"}
    | SERVERS
    | QUEUES
    | ENGINES
    | TEST_CODE,
    "cli": {"fastapi"} | QUEUES | ENGINES | TEST_CODE,
    "lab": {"api", "fastapi"} | QUEUES | ENGINES | TEST_CODE - {"lab"},
}
# What depends on vLLM's release, and what starts it.
RELEASE, LAUNCH = "workers/vllm/release", "workers/vllm/start/launch.py"
# The proof arithmetic knows nothing of Redis, of settings or of what is stored.
ARITHMETIC = ("poc_core/arithmetic", "poc_core/schemes")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """The dotted names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import: the arrows would be hard to see"
            # `from workers.vllm.release import ` imports a module too.
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def arrows(path: Path, ours: set[str], when_loaded: bool) -> set[str]:
    """The modules of ours that a file imports, wherever in it or only when it is loaded itself."""
    names: set[str] = set()
    tree = parsed(path)
    for node in run_when_loaded(tree) if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in ours else node.module for name in full}
    # the packages around a module are loaded before it; those around the file itself already are
    if when_loaded:
        names = {package for name in names for package in around(name)} - set(around(name_of(path)))
    return names & ours


def run_when_loaded(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one without those in functions and under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not later and not (
            isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        ):
            yield child
            yield from run_when_loaded(child)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def around(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


@cache
def graph(when_loaded: bool = False) -> dict[str, set[str]]:
    """What each module of ours imports of ours."""
    files = {name_of(path): path for package in (*FORBIDDEN, "bench") for path in modules(package)}
    assert len(files) > 100
    return {name: arrows(path, set(files), when_loaded) for name, path in files.items()}


def folder(name: str) -> str:
    is_package = (ROOT / name.replace(".", "/")).is_dir()
    return name if is_package else name.rpartition(".")[0]


@pytest.mark.parametrize("when_loaded", [True, False], ids=["when loaded", "ever"])
def test_no_modules_import_each_other(when_loaded: bool) -> None:
    try:
        TopologicalSorter(graph(when_loaded)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_module_imports_against_the_arrows(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): packages(path) & FORBIDDEN[package]
        for path in modules(package)
    }
    assert {name: found for name, found in wrong.items() if found} == {}


def test_only_what_depends_on_its_release_and_what_starts_it_imports_vllm() -> None:
    users = {
        str(path.relative_to(ROOT))
        for package in FORBIDDEN
        for path in modules(package)
        if "vllm" in packages(path)
    }
    assert {user for user in users if not user.startswith(RELEASE)} == {LAUNCH}
    assert len(users) > 5


def test_what_depends_on_vllms_release_has_no_way_back() -> None:
    ours = RELEASE.replace("/", ".")
    imported = {one for name in graph() if name.startswith(ours) for one in graph()[name]}
    assert [one for one in imported if one.startswith("workers") and not one.startswith(ours)] == []


def test_the_arithmetic_knows_nothing_of_redis() -> None:
    strange = ("redis", "poc_core.state", "poc_core.settings")
    for path in (path for folder in ARITHMETIC for path in modules(folder)):
        assert [name for name in imported(path) if name.startswith(strange)] == [], path


def test_no_two_folders_import_each_other() -> None:
    """Of folders beside each other; a folder stands for all below it."""
    found: dict[tuple[str, str], str] = {}
    for name, below in graph().items():
        for other in below:
            ours, theirs = folder(name).split("."), folder(other).split(".")
            both = enumerate(zip(ours, theirs, strict=False), 1)
            apart = next((n for n, (one, another) in both if one != another), None)
            if apart is not None:
                pair = ".".join(ours[:apart]), ".".join(theirs[:apart])
                found[pair] = f"{name} -> {other}"
    assert {pair: arrow for pair, arrow in found.items() if pair[::-1] in found} == {}


def test_no_module_imports_a_package_below_it_that_imports_the_module() -> None:
    whole = graph()
    both: set[tuple[str, str]] = set()
    for name, below in whole.items():
        if name.startswith("bench."):
            continue
        for other in below:
            rest = other.removeprefix(f"{folder(name)}.")
            package = f"{folder(name)}.{rest.partition('.')[0]}"
            if rest != other and "." in rest:
                users = (one for one in whole if one.startswith(f"{package}."))
                both |= {(name, package) for one in users if name in whole[one]}
    assert both == set()
