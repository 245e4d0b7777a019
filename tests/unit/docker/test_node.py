"""docker/node.sh: as whom the node's image runs; and the file of the swap. Without an engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.compose_file import ROOT

SWAP = ROOT / "docker" / "mlnode" / "docker-compose.proofline.yml"
# In place of the image's commands: say who would run what, and change no owner.
STANDINS = {
    "setpriv": 'echo "$@"',
    "python3": 'echo "as $(id -u): $*"',
    "chown": 'echo "chown $*" >&2',
    "mkdir": "true",
    "id": "echo 0",
    "stat": r"""shift; case "$2" in $HF_HOME) echo "$OWNER";; *) echo 0:0;; esac""",
    "find": 'echo "$FOUND"',
}


# What stands for the network's files in tests/docker.
NETWORK = sorted((ROOT / "tests" / "docker" / "network").glob("*.yml"))


def test_files_follow_the_compose_specification() -> None:
    check = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    files = [str(path) for path in (SWAP, *NETWORK)]
    done = subprocess.run([sys.executable, "-m", *check, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run(tmp_path: Path, owner: str, found: str = "") -> subprocess.CompletedProcess[str]:
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OWNER": owner, "FOUND": found}
    return subprocess.run(
        ["sh", str(ROOT / "docker" / "node.sh"), "up"],
        capture_output=True,
        text=True,
        env=env | {"HF_HOME": "/models"},
        check=True,
    )


def test_a_cache_of_one_owner_is_used_as_that_user(tmp_path: Path) -> None:
    done = run(tmp_path, "1000:1000")
    assert done.stdout.startswith("--reuid 1000 --regid 1000 --clear-groups")
    assert "chown -R 1000:1000 /data" in done.stderr


@pytest.mark.parametrize(("owner", "found"), [("0:0", ""), ("1000:1000", "/models/hub")])
def test_a_cache_of_root_or_of_several_is_used_as_root(
    tmp_path: Path, owner: str, found: str
) -> None:
    done = run(tmp_path, owner, found)
    assert done.stdout.startswith("as 0: -P -c from cli.main import app")
    assert done.stdout.endswith(" up\n")


def test_the_swap_changes_the_one_service_and_nothing_that_the_network_sets() -> None:
    swap = yaml.safe_load(SWAP.read_text())
    assert swap["services"].keys() == {"mlnode-308"}
    service = swap["services"]["mlnode-308"]
    assert service.keys() == {"image", "command", "volumes", "stop_grace_period"}
    assert service["volumes"] == ["proofline:/data"]
    lines = [line for line in SWAP.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) <= 8
