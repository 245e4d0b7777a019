"""What no GPU has shown yet is off, on GPUs, unless an engine's environment asks for it."""

import pytest
import torch

from workers.vllm import unseen

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "has_states", "routes_by_token", "said"),
    [
        (GPU, True, False, "keep states"),
        (GPU, False, True, "experts by token"),
        (GPU, False, False, None),
        (CPU, True, True, None),
    ],
)
def test_chains_of_states_and_token_routes_wait_for_a_gpu_to_show_them(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    has_states: bool,
    routes_by_token: bool,
    said: str | None,
) -> None:
    monkeypatch.delenv(unseen.SWITCH, raising=False)
    why = unseen.why_no_chains(device, has_states, routes_by_token)
    if said is None:
        assert why is None
    else:
        assert why is not None
        assert said in why
        assert unseen.SWITCH in why


def test_who_asks_for_them_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unseen.SWITCH, "on")
    assert unseen.is_on()
    assert unseen.why_no_chains(GPU, True, True) is None
