"""What a host keeps of its joining."""

import os
from pathlib import Path

import pytest

from cli.join.access import (
    Access,
    AccessError,
    check_writable,
    read_access,
    redis_url_of,
    write_access,
)

ACCESS = Access(
    api="https://node:8443",
    token_id="1d",
    name="gpu2",
    redis_url="rediss://host-gpu2:pw@10.0.0.1:6379/0",
    redis_ca="PEM",
)


@pytest.mark.promise("another user of a host", "cannot read the files that the host received")
def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "joined.json"
    before = os.umask(0)
    try:
        write_access(file.parent.parent / "loose.json", ACCESS)
        check_writable(file)
        write_access(file, ACCESS)
        url = redis_url_of(file, ACCESS)
    finally:
        os.umask(before)
    assert read_access(file) == ACCESS
    certificates = tmp_path / "new" / "joined.json.redis-ca.pem"
    assert url == f"{ACCESS.redis_url}?ssl_ca_certs={certificates}"
    assert {oct(path.stat().st_mode & 0o777) for path in file.parent.iterdir()} == {"0o600"}
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in file.parent.iterdir()} == {file.name, certificates.name}


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write_access(tmp_path / "joined.json", ACCESS)
    (tmp_path / "joined.json").chmod(0o640)
    with pytest.raises(AccessError, match="chmod 600"):
        read_access(tmp_path / "joined.json")


def test_what_is_not_there_or_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "joined.json"
    assert read_access(file) is None
    file.touch(0o600)
    file.write_text('{"password": "pw-of-another"}')
    with pytest.raises(AccessError, match="is not a file of") as refused:
        read_access(file)
    assert "pw-of" not in str(refused.value)
    with pytest.raises(AccessError, match="cannot be read"):
        read_access(tmp_path)


def test_a_place_that_cannot_be_written_is_told_before_the_token_is_spent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AccessError, match="--join-file"):
        check_writable(tmp_path / "file" / "joined.json")
    with pytest.raises(AccessError, match="--join-file"):
        write_access(tmp_path / "file" / "joined.json", ACCESS)
