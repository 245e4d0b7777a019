"""Mutations of the product that the unit tests should find: `make mutants` (MUTANTS=300 SEED=1).

cosmic-ray makes one drawn mutation at a time in a copy of the tracked files, and runs the unit
tests of the mutated package. Each core has a copy. Mutations that the tests do not find are
printed. Lua is left out.
"""

import argparse
import multiprocessing
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

from cosmic_ray.commands import init
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkerOutcome

ROOT = Path(__file__).resolve().parents[1]
# Area that is mutated -> the unit tests that should fail.
AREAS = {
    "poc_core/state": ["tests/unit/poc_core/state", "tests/unit/workers/courier/test_own_ports.py"],
    "poc_core/schemes": [
        "tests/unit/poc_core/schemes",
        "tests/unit/api/routes",
        "tests/unit/workers/pipeline/test_chains.py",
    ],
    "api/proofs": ["tests/unit/api/proofs", "tests/unit/api/routes"],
    "api/edge": ["tests/unit/api/edge"],
    "api/chat": ["tests/unit/api/chat"],
    "workers/courier": ["tests/unit/workers/courier"],
    **{
        f"workers/{name}.py": [f"tests/unit/workers/{test}" for test in tests]
        for name, tests in {
            "pipeline": ["pipeline", "test_proofs.py"],
            "proofs": ["test_proofs.py", "jobs", "rounds"],
            "chat_gate": ["test_chat_gate.py", "test_proofs.py"],
            "work": ["jobs", "rounds", "test_turns.py"],
            "housekeeping": ["test_housekeeping.py", "rounds"],
        }.items()
    },
}
# Changes `X | None` in annotations, which are not executed.
NOT_MADE = "core/ReplaceBinaryOperator_BitOr_"
# Mutations that no test can find, each with its reason.
EQUIVALENT = ROOT / "scripts/equivalent_mutants.toml"
# Of one mutation: some never end. All tests of an area take up to a minute.
MOST_SECONDS = 240


def mutations(area: str) -> list[MutationSpec]:
    with use_db(":memory:") as work:
        init(find_modules([Path(area)]), work, {})
        every = [one for item in work.work_items for one in item.mutations]
    return [one for one in every if not one.operator_name.startswith(NOT_MADE)]


def place_of(mutation: MutationSpec) -> str:
    place = f"{mutation.module_path}:{mutation.start_pos}"
    return f"{place}:{mutation.operator_name}:{mutation.occurrence:06}"


def tests_of(area: str, first: str) -> list[str]:
    """Returns the files of an area's tests; those with `first` in their names come first."""
    files = sorted(
        file
        for name in AREAS[area]
        for file in (Path(name).rglob("test_*.py") if Path(name).is_dir() else [Path(name)])
    )
    return [str(file) for file in sorted(files, key=lambda file: first not in str(file))]


def tested(python: str, files: list[str]) -> str:
    options = shlex.split("-m pytest -x -q -n 0 -p no:cacheprovider -m 'not slow'")
    return shlex.join([python, *options, *files])


def copied(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def enter(folders: "Queue[Path]", python: str, areas: list[str]) -> None:
    """Begins a process in a copy of its own, whose tests pass and are compiled."""
    os.chdir(folders.get())
    for area in areas:
        subprocess.run(
            shlex.split(tested(python, tests_of(area, ""))), check=True, stdout=sys.stderr
        )


def survived(area: str, mutation: MutationSpec, python: str) -> tuple[str, str]:
    """Returns the area, and the mutation's diff if no test found it."""
    files = tests_of(area, mutation.module_path.stem)
    result = mutate_and_test([mutation], tested(python, files), MOST_SECONDS)
    if result.worker_outcome is not WorkerOutcome.NORMAL:
        raise RuntimeError(f"{place_of(mutation)}: {result.output}")
    return area, "" if result.is_killed else str(result.diff)


def is_equivalent(diff: str) -> bool:
    lines = diff.splitlines()
    removed = {line[1:].strip() for line in lines if line.startswith("-")}
    if "@abstractmethod" in removed:
        return True  # mypy refuses an empty method that is not abstract
    added = {line[1:].strip() for line in lines if line.startswith("+")}
    return any(
        f"+++ b/{known['file']}" in lines and known["becomes"] in added
        for known in tomllib.loads(EQUIVALENT.read_text()).get("mutant", ())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--area", action="append", choices=AREAS, help="these alone")
    given = parser.parse_args()
    os.chdir(ROOT)
    areas = given.area or list(AREAS)
    named = {name for area in areas for name in (area, *AREAS[area])}
    if gone := sorted(name for name in named if not Path(name).exists()):
        parser.error(f"AREAS names missing paths: {', '.join(gone)}")
    every = sorted(
        ((area, one) for area in areas for one in mutations(area)),
        key=lambda drawn: (drawn[0], place_of(drawn[1])),
    )
    drawn = random.Random(given.seed).sample(every, min(given.n, len(every)))
    print(f"{len(drawn)} of {len(every)} mutations", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        Path(temporary).chmod(0o755)  # some tests run as nobody
        return mutate(Path(temporary), drawn, given.python)


def mutate(temporary: Path, drawn: list[tuple[str, MutationSpec]], python: str) -> int:
    folders: Queue[Path] = multiprocessing.Manager().Queue()
    n = os.cpu_count() or 1
    for number in range(n):
        copied(temporary / str(number))
        folders.put(temporary / str(number))
    areas = sorted({area for area, _ in drawn})
    left = []
    with ProcessPoolExecutor(n, initializer=enter, initargs=(folders, python, areas)) as pool:
        tries = [pool.submit(survived, area, mutation, python) for area, mutation in drawn]
        for one in as_completed(tries):
            area, diff = one.result()
            if diff and not is_equivalent(diff):
                left.append(area)
                print(diff, flush=True)
    for area in areas:
        n_drawn = sum(of == area for of, _ in drawn)
        print(f"{area}: {left.count(area)} of {n_drawn} survived")
    print(f"{len(left)} of {len(drawn)} survived")
    return int(len(left) > 0.05 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
