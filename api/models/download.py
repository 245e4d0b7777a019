"""The process that downloads one model: `python -m api.models.download NAME TASK_ID`.

The process sends heartbeats to Redis. If the process dies, another process continues
the download. If the download is cancelled, the process ends early.
"""

import glob
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from api.models.cache import CacheError, ModelCache, free_bytes
from api.models.files import BrokenModelError, chosen, indexed, missing, small
from poc_core.errors import ProoflineError
from poc_core.periodic import Periodic
from poc_core.settings import load_settings
from poc_core.state import downloads
from poc_core.state.client import connect

logger = logging.getLogger(__name__)

# Seconds without Redis after which the process ends, because the node has probably been stopped.
_PATIENCE_S = 60.0
_GB = 1e9


def main(name: str, task_id: str) -> None:
    store = downloads.DownloadStore(connect(load_settings()))
    download = store.by_name(name)
    if download is not None and download.task_id == task_id and store.renew(download):
        life = Periodic("life of the download", downloads.ALIVE_S / 5, _Life(store, download).go_on)
        life.start()
        error = fetch(download)
        life.stop()
        store.end(download, error)
    store.leave(task_id)


def fetch(download: downloads.Download) -> str | None:
    """Downloads the files that vLLM loads from a model. Returns an error text, None on success."""
    cache = ModelCache()
    try:
        _fetch(download, cache)
    except Exception as error:  # from the hub, the network or the disk
        logger.warning("%s could not be downloaded: %s", download.name, error)
        said = (
            str(error) if isinstance(error, ProoflineError) else f"{type(error).__name__}: {error}"
        )
        return f"{said[:800]} ({cache.here(download.hf_repo)})"
    return None


def _fetch(download: downloads.Download, cache: ModelCache) -> None:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    repo, api = download.hf_repo, HfApi()
    commit = api.model_info(repo, revision=download.hf_commit).sha
    tree = {
        file.path: file
        for file in api.list_repo_tree(repo, recursive=True, revision=commit)
        if hasattr(file, "size")
    }

    def get(name: str, again: bool = False) -> Path:
        path = hf_hub_download(
            repo, name, revision=commit, cache_dir=cache.path, force_download=again
        )
        return Path(path)

    def get_right(name: str) -> Path:
        """Downloads a file. Downloads it again if the size is wrong, as after a partial copy."""
        path = get(name)
        return path if path.stat().st_size == tree[name].size else get(name, again=True)

    weights, index = chosen(tree)
    if index in tree and index.endswith(".safetensors.index.json"):  # vLLM reads no other index
        weights = indexed(get_right(index)) & tree.keys()
    others = small(tree)
    wanted = weights | others
    _check_room(cache, repo, [tree[name] for name in wanted])
    folder = snapshot_download(
        repo,
        revision=download.hf_commit,
        cache_dir=cache.path,
        allow_patterns=[glob.escape(name) for name in sorted(wanted)],
    )
    for name in sorted(wanted):
        get_right(name)
    try:
        lacks = missing(Path(folder))
    except BrokenModelError:  # a damaged file of the right size
        for name in others:
            get(name, again=True)
        lacks = missing(Path(folder))
    if lacks:
        raise BrokenModelError(f"The hub's {repo} at {commit} has no {', '.join(lacks)}")


def _check_room(cache: ModelCache, repo: str, files: list[Any]) -> None:
    """Raises CacheError if the disk has too little space for the missing files among `files`."""
    blobs = cache.folder(repo) / "blobs"
    needs = sum(
        file.size
        for file in files
        if not (blobs / (file.lfs.sha256 if file.lfs else file.blob_id)).exists()
    )
    needs -= cache.begun_bytes(repo)
    free = free_bytes(cache.path)
    if needs > free:
        raise CacheError(
            f"{repo} needs {needs / _GB:.1f} GB more and {cache.path} has {free / _GB:.1f} GB free:"
            " delete another model, or name another disk with HF_HOME"
        )


@dataclass
class _Life:
    """Sends the process's heartbeats to Redis. Ends the process if the download is cancelled."""

    _store: downloads.DownloadStore
    _download: downloads.Download
    _answered_at: float = field(default_factory=time.monotonic)

    def go_on(self) -> None:
        try:
            wanted = self._store.renew(self._download)
            self._answered_at = time.monotonic()
        except RedisError:
            wanted = time.monotonic() - self._answered_at < _PATIENCE_S
        if not wanted:
            with suppress(RedisError):
                self._store.leave(self._download.task_id)
            os._exit(0)  # ends the process during any step of the download


if __name__ == "__main__":
    main(*sys.argv[1:])
