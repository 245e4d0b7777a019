"""Reads this machine's Hugging Face cache. An unreadable model does not affect other models."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from api.models.files import BrokenModelError, missing
from poc_core.errors import ProoflineError

_GB = 1024**3
_PREFIX = "models--"

Stage = Literal["DOWNLOADED", "PARTIAL", "NOT_FOUND"]


class CacheError(ProoflineError):
    """The cache cannot be read or changed. The text names the folder and the reason."""


class DiskSpace(BaseModel):
    cache_size_gb: float
    available_gb: float
    cache_path: str


@dataclass(frozen=True)
class Revision:
    """One commit of a model in the cache. Some of its files can be missing."""

    commit: str
    refs: frozenset[str]
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.commit} ({', '.join(sorted(self.refs))})" if self.refs else self.commit


class ModelCache:
    """Reads and deletes models in this machine's cache. download.py downloads them."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the cache's folder; None means Hugging Face's default (HF_HUB_CACHE, HF_HOME)."""
        self._path = path

    @property
    def path(self) -> Path:
        from huggingface_hub import constants  # imported when needed: takes 0.1 s

        return self._path or Path(constants.HF_HUB_CACHE)

    def folder(self, hf_repo: str) -> Path:
        return self.path / (_PREFIX + hf_repo.replace("/", "--"))

    def stage(self, hf_repo: str, hf_commit: str | None) -> Stage:
        """Returns whether the cache has all, some or no files of a model (or of one revision)."""
        try:
            revisions = self.revisions(hf_repo, hf_commit)
        except BrokenModelError:
            return "PARTIAL"
        if any(_is_whole(revision) for revision in revisions):
            return "DOWNLOADED"
        return "PARTIAL" if revisions or self.begun_bytes(hf_repo) else "NOT_FOUND"

    def trouble(self, hf_repo: str, hf_commit: str | None) -> str | None:
        """Returns an error text if a model's files cannot be read, else None."""
        try:
            for revision in self.revisions(hf_repo, hf_commit):
                missing(revision.folder)
        except BrokenModelError as error:
            return f"{error}."
        return None

    def offline(self, hf_repo: str) -> str | None:
        from huggingface_hub import constants

        if not constants.HF_HUB_OFFLINE:
            return None
        return f"HF_HUB_OFFLINE forbids to ask the hub for {hf_repo}; {self.here(hf_repo)}."

    def here(self, hf_repo: str) -> str:
        """Returns a phrase for error texts that names all cached revisions of a model."""
        try:
            names = [one.name for one in self.revisions(hf_repo, None, all_of_them=True)]
        except BrokenModelError as error:
            return str(error)
        return f"{self.path} has " + (
            f"its revisions {', '.join(names)}" if names else "no revision of it"
        )

    def models(self) -> Iterator[tuple[str, str | None, Stage]]:
        """Yields (repository, commit or None, stage) of each cached revision. Raises CacheError."""
        for name in self._entries():
            hf_repo = name.removeprefix(_PREFIX).replace("--", "/")
            if hf_repo == name:  # a dataset, not a model
                continue
            try:
                revisions = self.revisions(hf_repo, None, all_of_them=True)
            except BrokenModelError:
                yield hf_repo, None, "PARTIAL"
                continue
            for revision in revisions:
                yield hf_repo, revision.commit, "DOWNLOADED" if _is_whole(revision) else "PARTIAL"
            if not revisions and self.begun_bytes(hf_repo):
                yield hf_repo, None, "PARTIAL"

    def revisions(
        self, hf_repo: str, hf_commit: str | None, all_of_them: bool = False
    ) -> list[Revision]:
        """Returns the cached revisions of a model that match `hf_commit` (a commit, branch or tag).

        If `hf_commit` is None, returns the revision `main`, or all revisions if there is no `main`.
        `all_of_them`: returns all revisions. BrokenModelError if the folder cannot be read.
        """
        folder = self.folder(hf_repo)
        try:
            commits = sorted(os.listdir(folder / "snapshots"))
        except FileNotFoundError:
            if folder.is_symlink() and not folder.exists():
                raise BrokenModelError(f"{folder} is a link to nothing") from None
            commits = []
        except OSError as error:
            raise BrokenModelError(
                f"{error.filename} cannot be read: {error.strerror or error}"
            ) from None
        refs = _refs(folder / "refs")
        found = [
            Revision(
                commit,
                frozenset(name for name, of in refs.items() if of == commit),
                folder / "snapshots" / commit,
            )
            for commit in commits
            if not commit.startswith(".")
        ]
        if all_of_them:
            return found
        if hf_commit is not None:
            return [one for one in found if hf_commit == one.commit or hf_commit in one.refs]
        return [one for one in found if "main" in one.refs] or found

    def begun_bytes(self, hf_repo: str) -> int:
        """Returns how many bytes a model's incomplete downloads take; 0 if there are none."""
        begun = (self.folder(hf_repo) / "blobs").glob("*.incomplete")
        return sum(1 + _size(path) for path in begun)

    def delete(self, hf_repo: str, hf_commit: str | None) -> bool:
        """Deletes a model or revision. Returns False if it was not cached. May raise CacheError."""
        folder = self.folder(hf_repo)
        try:
            if hf_commit is None:
                return _remove(folder)
            revisions = self.revisions(hf_repo, None, all_of_them=True)
            wanted = [one for one in revisions if hf_commit == one.commit or hf_commit in one.refs]
            if wanted and wanted == revisions:
                return _remove(folder)
            kept = _blobs(folder, [one for one in revisions if one not in wanted])
            unused = _blobs(folder, wanted) - kept
            for revision in wanted:
                for ref in revision.refs:
                    _remove(folder / "refs" / ref)
                _remove(revision.folder)
            for blob in unused:
                _remove(blob)
        except BrokenModelError as error:
            raise CacheError(f"{hf_repo} cannot be deleted by its commit: {error}.") from None
        except OSError as error:
            raise CacheError(
                f"{hf_repo} could not be deleted completely: {folder}: {error.strerror or error}."
            ) from None
        return bool(wanted)

    def space(self) -> DiskSpace:
        """Returns the cache's size and the free disk space. CacheError if it cannot be read."""
        path = self.path
        used = sum(
            _size(os.path.join(folder, name))
            for entry in self._entries()
            for folder, _, names in os.walk(path / entry)
            for name in names
        )
        return DiskSpace(
            cache_size_gb=used / _GB,
            available_gb=free_bytes(path) / _GB,
            cache_path=str(path),
        )

    def _entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:  # nothing was ever downloaded
            return []
        except OSError as error:
            raise CacheError(
                f"The cache {self.path} cannot be read: {error.strerror or error}; HF_HOME names"
                " another."
            ) from None


def free_bytes(path: Path) -> int:
    """Returns the free bytes of the disk that holds `path`, a folder that need not exist yet."""
    folders = (path, *path.absolute().parents)
    return shutil.disk_usage(next(filter(os.path.exists, folders))).free


def _is_whole(revision: Revision) -> bool:
    try:
        return not missing(revision.folder)
    except BrokenModelError:
        return False


def _refs(folder: Path) -> dict[str, str]:
    """Returns the commit of each ref (branch or tag) by the ref's name. Skips unreadable refs."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with suppress(OSError, ValueError):
                if path.is_file():  # not a pipe, which might never end
                    found[path.relative_to(folder).as_posix()] = path.read_text().strip()
    return found


def _blobs(repo: Path, revisions: list[Revision]) -> set[str]:
    """Returns the paths of these revisions' blobs. OSError if a folder cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    found = set()
    for revision in revisions:
        for place, _, names in os.walk(revision.folder, onerror=fail):
            for path in (os.path.join(place, name) for name in names):
                if os.path.islink(path):
                    found.add(os.path.abspath(os.path.join(place, os.readlink(path))))
    store = os.path.join(os.path.abspath(repo), "blobs", "")
    return {path for path in found if path.startswith(store)}


def _remove(path: str | Path) -> bool:
    """Deletes a file, link or folder. Returns False if it did not exist. OSError if this fails."""
    if not os.path.lexists(path):
        return False
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    return True


def _size(path: str | Path) -> int:
    """Returns a file's size in bytes; 0 for a link or a missing file."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return 0 if stat.S_ISLNK(found.st_mode) else found.st_size
