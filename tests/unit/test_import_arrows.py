"""Imports point one way (docs/architecture.md): api -> poc_core <- workers; vLLM in workers/."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("arrows")  # one process reads all modules

ROOT = Path(__file__).resolve().parents[2]

# Packages that the node never imports.
TEST_CODE = {"tests", "bench", "lab", "pytest", "fakeredis"}
SERVERS, QUEUES = {"fastapi", "starlette", "uvicorn"}, {"celery", "kombu"}
ENGINES = {"vllm", "transformers"}
CLIENTS = {"api", "workers", "cli"} | SERVERS | QUEUES | ENGINES | TEST_CODE
# What starts vLLM, and what depends on vLLM's release.
LAUNCH, RELEASE = "workers.vllm.start.launch", "workers.vllm.release"
NOT_OF_ARITHMETIC = {"redis", "poc_core.state", "poc_core.settings"}
# What modules whose names begin so must not import, also inside a function.
FORBIDDEN = {
    "api.": {"workers", "cli", "proofline", "torch"} | ENGINES | TEST_CODE,
    "poc_core.": CLIENTS | {"proofline"},
    "poc_core.arithmetic.": NOT_OF_ARITHMETIC,
    "poc_core.schemes.": NOT_OF_ARITHMETIC,
    "workers.": {"api", "cli", "proofline", "fastapi", "typer"} | TEST_CODE,
    "proofline.": CLIENTS | {"redis", "torch", "numpy"},
    "cli.": {"fastapi"} | QUEUES | ENGINES | TEST_CODE,
    "lab.": {"api", "fastapi"} | QUEUES | ENGINES | TEST_CODE - {"lab"},
}
FOLDERS = ("api", "poc_core", "workers", "proofline", "cli", "lab", "bench")


def around(name: str) -> set[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


@cache
def imports() -> dict[str, set[str]]:
    """What each module of ours imports, wherever in it, with the packages around that."""
    found = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = {one for imported in names for one in around(imported)} - around(name)
    assert len(found) > 300
    return found


@cache
def graph() -> dict[str, set[str]]:
    return {name: found & imports().keys() for name, found in imports().items()}


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(graph()).prepare()  # a CycleError names them


@pytest.mark.parametrize("begin", FORBIDDEN)
def test_no_module_imports_against_the_arrows(begin: str) -> None:
    wrong = {
        name: found & FORBIDDEN[begin]
        for name, found in imports().items()
        if f"{name}.".startswith(begin)
    }
    assert wrong
    assert {name: found for name, found in wrong.items() if found} == {}


def test_only_what_depends_on_its_release_and_what_starts_it_imports_vllm() -> None:
    users = {one for one, found in imports().items() if "vllm" in found and one[:6] != "bench."}
    assert {user for user in users if not user.startswith(RELEASE)} == {LAUNCH}
    assert len(users) > 5


def test_what_depends_on_vllms_release_has_no_way_back() -> None:
    used = {one for name in graph() if name.startswith(RELEASE) for one in graph()[name]}
    strange = {one for one in used if one.startswith("workers.") and not one.startswith(RELEASE)}
    assert strange - around(RELEASE) == set()


def test_no_two_folders_import_each_other_nor_a_module_and_a_folder_beside_it() -> None:
    """A folder stands for all below it."""
    found: dict[tuple[str, str], str] = {}
    for name, below in graph().items():
        for other in below:
            ours, theirs = name.split("."), other.split(".")
            both = enumerate(zip(ours, theirs, strict=False), 1)
            apart = next((n for n, (one, another) in both if one != another), None)
            if apart is not None:
                found[".".join(ours[:apart]), ".".join(theirs[:apart])] = f"{name} -> {other}"
    assert {pair: arrow for pair, arrow in found.items() if pair[::-1] in found} == {}
