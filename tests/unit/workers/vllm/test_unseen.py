"""What no GPU has shown yet is off, on GPUs, unless an engine's environment asks for it."""

import pytest
import torch

from workers.vllm import unseen

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_chains_of_token_routes_wait_for_a_gpu_to_show_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(unseen.SWITCH, raising=False)
    why = unseen.why_no_chains(GPU, True)
    assert why is not None
    assert "experts by token" in why
    assert unseen.SWITCH in why
    assert unseen.why_no_chains(GPU, False) is None
    assert unseen.why_no_chains(CPU, True) is None


def test_who_asks_for_them_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unseen.SWITCH, "on")
    assert unseen.is_on()
    assert unseen.why_no_chains(GPU, True) is None
