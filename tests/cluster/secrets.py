"""The secrets of a node in a cluster, as the page has an operator make them."""

import subprocess
from pathlib import Path

from tests.harness.compose_file import ROOT
from tests.stacks.local_compose import as_redis_here_reads_it


def secrets_in(folder: Path) -> dict[str, dict[str, str]]:
    """By name and key, made in folder/redis by the very script that makes users."""
    made = folder / "redis"
    made.mkdir()
    script, users = (str(ROOT / "docker" / name) for name in ("make_secrets.sh", "users.acl"))
    subprocess.run(["sh", script, str(made), str(made / "each"), users], check=True)
    as_redis_here_reads_it(made / "users.acl")
    held = {path.name: path.read_text() for path in made.iterdir() if path.is_file()}
    return {"proofline": held | {"api_key": "a key of these tests, long enough"}}
