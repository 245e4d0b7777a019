"""Variables of MLNode's Compose files are understood, or named in one warning."""

import pytest

from cli.supervise.up import ignored_variables
from poc_core.settings import Settings


def test_what_is_understood_is_not_named() -> None:
    ours = {f"POC_{name.upper()}" for name in Settings.model_fields}
    others = {"HF_HOME", "HF_TOKEN", "GONKA_METRICS", "VLLM_CACHE_ROOT", "KEY_NAME", "PATH"}
    assert ignored_variables(ours | others) is None


@pytest.mark.parametrize(
    "name",
    ["WATCHER_GRACE_FIRST_HEALTHY", "VLLM_RUNNER_TIMEOUT", "MODEL_NAME", "POC_DECODE_CAPTURE"],
)
def test_what_is_not_is_named(name: str) -> None:
    assert f"ignoring {name}: this node has no such" in (ignored_variables({name}) or "")


def test_all_are_named_at_once_and_the_old_backend_says_what_counts() -> None:
    said = ignored_variables({"VLLM_ATTENTION_BACKEND", "POC_TYPO", "POC_CHAT_POLICY"})
    assert said is not None
    assert said.startswith("ignoring POC_TYPO, VLLM_ATTENTION_BACKEND: ")
    assert "--attention-backend" in said
