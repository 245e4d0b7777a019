"""The file of keys: hashed at rest, for its owner alone, read again when it changes."""

import errno
import os
from pathlib import Path

import pytest

from api.edge.keys import Caller, KeyFile, KeysError, Role


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "of" / "the" / "node" / "keys.json")


def test_a_key_is_known_by_its_name_and_roles(file: KeyFile) -> None:
    key = file.add("aggregator", [Role.PROOFS, Role.CHAT])
    assert file.caller(key) == Caller("aggregator", frozenset({Role.PROOFS, Role.CHAT}))
    assert file.caller(key + "x") is None


@pytest.mark.promise("another user of the machine", "cannot read key files or Redis' password")
def test_the_file_tells_no_key_and_only_its_owner_reads_it(file: KeyFile) -> None:
    key = file.add("a", [Role.PROOFS])
    assert key.removeprefix("proofline_") not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_running_api_sees_new_keys_and_revoked_ones(file: KeyFile) -> None:
    running = KeyFile(file.path)
    assert running.caller("any") is None
    key = file.add("a", [Role.CHAT])
    assert running.caller(key) is not None
    file.revoke("a")
    assert running.caller(key) is None


def test_a_removed_file_opens_nothing(file: KeyFile) -> None:
    key = file.add("a", [Role.CHAT])
    assert file.caller(key)
    file.path.unlink()
    assert file.caller(key) is None


def test_a_slip_in_the_file_locks_nobody_out(file: KeyFile) -> None:
    key = file.add("a", [Role.CHAT])
    assert file.caller(key)
    file.path.write_text("{")
    assert file.caller(key)
    with pytest.raises(KeysError, match="fix or remove it"):
        file.keys()


def test_a_file_that_becomes_readable_counts_without_another_change(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, running = file.add("a", [Role.CHAT]), KeyFile(file.path)
    with monkeypatch.context() as unreadable:  # root reads files of any mode

        def refuse(path: Path) -> bytes:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        unreadable.setattr(Path, "read_bytes", refuse)
        assert running.caller(key) is None
    file.path.chmod(0o644)
    assert running.caller(key) is not None


def test_names_are_given_once(file: KeyFile) -> None:
    file.add("a", [Role.CHAT])
    with pytest.raises(KeysError, match="a key named a"):
        file.add("a", [Role.CHAT])
    with pytest.raises(KeysError, match="there are: a"):
        file.revoke("b")
    with pytest.raises(KeysError, match="1 to 64"):
        file.add("a b", [Role.CHAT])


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match="POC_API_KEYS_FILE"):
        KeyFile(tmp_path / "file" / "keys.json").add("a", [Role.CHAT])


def test_one_of_the_environment_is_for_everything(file: KeyFile) -> None:
    own = KeyFile(file.path, beside="a key of 16 characters or more")
    caller = own.caller("a key of 16 characters or more")
    assert caller is not None
    assert all(caller.may(role) for role in Role)
    assert not os.path.exists(file.path)


@pytest.mark.parametrize(
    ("roles", "looks"), [([Role.CHAT], False), ([Role.PROOFS], True), ([Role.DEPLOY], True)]
)
def test_who_may_look(roles: list[Role], looks: bool) -> None:
    caller = Caller("a", frozenset(roles))
    assert caller.may(Role.READ) is looks
    assert [role for role in (Role.PROOFS, Role.CHAT, Role.DEPLOY) if caller.may(role)] == roles
