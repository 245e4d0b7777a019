"""The Hugging Face cache of this machine: which models lie there, whole or in part."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_GB = 1024**3
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

Stage = Literal["DOWNLOADED", "PARTIAL", "NOT_FOUND"]


@dataclass(frozen=True)
class Space:
    cache_size_gb: float
    available_gb: float
    cache_path: str


class ModelCache:
    """Reads and deletes this machine's models; download.py fetches them in another process."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None for the folder that HF_HOME or HF_HUB_CACHE names."""
        self._path = path

    @property
    def path(self) -> Path:
        from huggingface_hub import constants  # here: it takes 0.1 s

        return self._path or Path(constants.HF_HUB_CACHE)

    def stage(self, hf_repo: str, hf_commit: str | None) -> Stage:
        """How much of a model is there; without a commit, of `main` or any revision."""
        repo = self._repo(hf_repo)
        if repo is None:
            return "NOT_FOUND"
        revisions = self._revisions(repo, hf_commit)
        if any(is_whole(Path(revision.snapshot_path)) for revision in revisions):
            return "DOWNLOADED"
        begun = any((Path(repo.repo_path) / "blobs").glob("*.incomplete"))
        return "PARTIAL" if revisions or begun else "NOT_FOUND"

    def models(self) -> Iterator[tuple[str, str, Stage]]:
        """(repository, commit, stage) of every revision of a model."""
        for repo in self._repos():
            for revision in sorted(repo.revisions, key=lambda one: str(one.commit_hash)):
                stage: Stage = "DOWNLOADED" if is_whole(Path(revision.snapshot_path)) else "PARTIAL"
                yield repo.repo_id, revision.commit_hash, stage

    def delete(self, hf_repo: str, hf_commit: str | None) -> bool:
        """Deletes a revision, or all without a commit; False: there is none."""
        repo = self._repo(hf_repo)
        if repo is None:
            return False
        if hf_commit is None:
            shutil.rmtree(repo.repo_path)
            return True
        commits = [revision.commit_hash for revision in self._revisions(repo, hf_commit)]
        if commits:
            self._scan().delete_revisions(*commits).execute()
        return bool(commits)

    def space(self) -> Space:
        path = self.path
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        used = sum(repo.size_on_disk for repo in self._repos())
        return Space(used / _GB, shutil.disk_usage(existing).free / _GB, str(path))

    def _scan(self) -> Any:
        from huggingface_hub import scan_cache_dir

        return scan_cache_dir(self.path)

    def _repos(self) -> list[Any]:
        from huggingface_hub.errors import CacheNotFound

        try:
            found = self._scan().repos
        except CacheNotFound:  # nothing was ever downloaded
            return []
        return sorted(
            (repo for repo in found if repo.repo_type == "model"),
            key=lambda repo: str(repo.repo_id),
        )

    def _repo(self, hf_repo: str) -> Any | None:
        return next((repo for repo in self._repos() if repo.repo_id == hf_repo), None)

    def _revisions(self, repo: Any, hf_commit: str | None) -> list[Any]:
        if hf_commit is not None:
            return [
                one
                for one in repo.revisions
                if one.commit_hash == hf_commit or hf_commit in one.refs
            ]
        return [one for one in repo.revisions if "main" in one.refs] or list(repo.revisions)


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot has a configuration and all weights of its index, or any without one.

    A file that is still being downloaded is not there.
    """
    if not (snapshot / "config.json").exists():
        return False
    for index in sorted(snapshot.glob("*.index.json")):
        shards = set(json.loads(index.read_text()).get("weight_map", {}).values())
        if shards and all((snapshot / shard).exists() for shard in shards):
            return True
    if any(snapshot.glob("*.index.json")):
        return False
    return any(path.exists() for pattern in _WEIGHTS for path in snapshot.glob(pattern))
