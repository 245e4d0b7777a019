"""Models in a Hugging Face cache, as huggingface_hub leaves them."""

from pathlib import Path

MODELS = "/api/v1/models"
REPO = "acme/small"
COMMIT = "a" * 40


def put(cache: Path, files: dict[str, str], repo: str = REPO, commit: str = COMMIT) -> Path:
    """As huggingface_hub leaves a repository."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for name, text in files.items():
        (folder / "blobs" / f"{commit[:4]}-{name}").write_text(text)
        (snapshot / name).symlink_to(folder / "blobs" / f"{commit[:4]}-{name}")
    return folder


TOKENIZED = {"config.json": "{}", "tokenizer.json": "{}"}
WHOLE = {**TOKENIZED, "model.safetensors": "x" * 1000}
