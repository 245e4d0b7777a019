"""`proofline key`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.edge.keys import KeyFile, Role
from cli.main import app
from tests.harness.samples import known


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFile:
    monkeypatch.setenv("POC_API_KEYS_FILE", str(tmp_path / "keys.json"))
    return KeyFile(tmp_path / "keys.json")


def test_a_key_is_shown_once_and_may_be_listed_and_revoked(file: KeyFile) -> None:
    run = CliRunner().invoke
    made = run(app, ["key", "new", "aggregator", "--role", "proofs", "--role", "chat"])
    assert made.exit_code == 0, made.output
    caller = known(file.caller(made.stdout.strip()))
    assert caller.roles == {Role.PROOFS, Role.CHAT}
    listed = run(app, ["key", "list"]).stdout
    assert listed.startswith("aggregator\tchat,proofs\t")
    assert made.stdout.strip() not in listed
    assert run(app, ["key", "revoke", "aggregator"]).exit_code == 0
    assert file.caller(made.stdout.strip()) is None


@pytest.mark.parametrize("more", [[], ["--role", "read-only"]])
def test_a_key_for_the_network_node_has_all_its_roles(file: KeyFile, more: list[str]) -> None:
    made = CliRunner().invoke(app, ["key", "new", "network-node", "--role", "node", *more])
    assert made.exit_code == 0, made.output
    caller = known(file.caller(made.stdout.strip()))
    assert {Role.PROOFS, Role.CHAT, Role.DEPLOY} <= caller.roles
    assert all(caller.may(role) for role in Role)
    assert "may be used for chat, deploy, proofs" in made.stderr


def test_a_role_must_be_chosen(file: KeyFile) -> None:
    assert CliRunner().invoke(app, ["key", "new", "a"]).exit_code == 2
    assert file.keys() == []


def test_what_is_not_there_cannot_be_revoked(file: KeyFile) -> None:
    done = CliRunner().invoke(app, ["key", "revoke", "nobody"])
    assert done.exit_code == 1
    assert "there are: none" in done.output
