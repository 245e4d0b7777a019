"""Mutations of the product that the unit tests should find: `make mutants` (MUTANTS=300 SEED=1).

cosmic-ray mutates a copy of the tracked files, one mutation at a time, and runs the unit tests of
the mutated package. Mutations that the tests do not find are printed. Lua is left out.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parents[1]
# Area that is mutated -> the unit tests that should fail.
AREAS = {
    "poc_core/state": ["tests/unit/poc_core/state"],
    "poc_core/schemes": ["tests/unit/poc_core/schemes", "tests/unit/api/routes"],
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
SKIPPED = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not drawn")

CONFIG = """
[cosmic-ray]
module-path = {path!r}
timeout = 1800.0
excluded-modules = []
test-command = {command!r}
[cosmic-ray.distributor]
name = "local"
"""


def copied(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def session(folder: Path, path: str) -> Path:
    return folder / f"{path.replace('/', '-')}.sqlite"


def place_of(item: WorkItem) -> str:
    """Returns a stable name for drawing by a seed, because job ids are random."""
    (one,) = item.mutations
    return f"{one.module_path}:{one.start_pos}:{one.operator_name}:{one.occurrence:06}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--area", action="append", choices=AREAS, help="these alone")
    given = parser.parse_args()
    areas = given.area or list(AREAS)
    named = {name for area in areas for name in (area, *AREAS[area])}
    if gone := sorted(name for name in named if not (ROOT / name).exists()):
        parser.error(f"AREAS names missing paths: {', '.join(gone)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        return mutate(Path(temporary), areas, given)


def mutate(folder: Path, areas: list[str], given: argparse.Namespace) -> int:
    copied(folder)
    tool = str(Path(sys.executable).with_name("cosmic-ray"))
    every: list[tuple[str, str, str]] = []  # path, place, job
    for path in areas:
        command = f"{given.python} -m pytest -x -q -n 0 -p no:cacheprovider -m 'not slow' "
        config = session(folder, path).with_suffix(".toml")
        config.write_text(CONFIG.format(path=path, command=command + " ".join(AREAS[path])))
        subprocess.run([tool, "init", config, session(folder, path)], cwd=folder, check=True)
        with use_db(str(session(folder, path))) as work:
            every += [
                (path, place_of(item), item.job_id)
                for item in work.work_items
                if not item.mutations[0].operator_name.startswith(NOT_MADE)
            ]
    sample = random.Random(given.seed).sample(sorted(every), min(given.n, len(every)))
    drawn = {(path, job) for path, _, job in sample}
    print(f"{len(drawn)} of {len(every)} mutations", flush=True)
    n_survived = 0
    for path in dict.fromkeys(path for path, _ in sorted(drawn)):
        with use_db(str(session(folder, path))) as work:
            others = [one.job_id for one in work.work_items if (path, one.job_id) not in drawn]
            work.set_multiple_results(others, SKIPPED)
        config = session(folder, path).with_suffix(".toml")
        subprocess.run([tool, "exec", config, session(folder, path)], cwd=folder, check=True)
        with use_db(str(session(folder, path))) as work:
            found = [result for _, result in work.results if result.output != "not drawn"]
        survived = [one for one in found if one.test_outcome is TestOutcome.SURVIVED]
        n_survived += len(survived)
        print(f"{path}: {len(survived)} of {len(found)} survived", flush=True)
        for one in survived:
            print(one.diff, flush=True)
    print(f"{n_survived} of {len(drawn)} survived")
    return int(n_survived > 0.05 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
