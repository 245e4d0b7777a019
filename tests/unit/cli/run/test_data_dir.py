"""`up` makes its --data-dir private, so it must not be somebody else's folder."""

from pathlib import Path

import pytest

from cli.run.up import check_is_free
from cli.terminal import UsageError


@pytest.mark.parametrize("name", ["notes.txt", ".git"])
def test_a_folder_of_other_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match="has files of other programs; choose a new or empty"):
        check_is_free(tmp_path)


@pytest.mark.parametrize(
    "names", [[], ["logs", "lost+found"], ["dump.rdb"], ["logs", "logs-2", "proofline.lock"]]
)
def test_a_new_folder_a_backup_and_an_earlier_one_are_taken(
    tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    check_is_free(tmp_path)
    check_is_free(tmp_path / "new")
