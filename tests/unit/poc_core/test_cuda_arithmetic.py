"""A GPU computes the same numbers as a CPU: hashes exactly, floats up to their last bits."""

from typing import Any

import pytest
import torch

from poc_core import rng
from poc_core.encoding import decode_vector
from poc_core.records import ProofSpec
from poc_core.schemes import load_scheme

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SEEDS = [0, 12345, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
# Above the keys that are cached (2^23), so that both paths run.
MANY = (1 << 23) + 3


@pytest.mark.parametrize("n", [1, 4097, MANY])
def test_hashes_are_exact(n: Any) -> None:
    assert torch.equal(rng.hash_bits(SEEDS, n, GPU).cpu(), rng.hash_bits(SEEDS, n, CPU))


@pytest.mark.parametrize("n", [7, 100_003, MANY])
def test_normal_is_the_cpus(n: Any) -> None:
    torch.testing.assert_close(rng.normal(SEEDS, n, GPU).cpu(), rng.normal(SEEDS, n, CPU), rtol=0, atol=2e-6)


@pytest.mark.parametrize("hidden", [128, 5120])
@pytest.mark.parametrize("k_dim", [1, 12, 128])
def test_picks_are_the_cpus_in_order(hidden: int, k_dim: int) -> None:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=8, options={"k_dim": k_dim})
    schemes: list[Any] = [
        load_scheme(spec, hidden_size=hidden, n_layers=1, device=device, dtype=torch.float32) for device in (CPU, GPU)
    ]
    picks = [scheme.pick([0, 7, 2**63 - 1]) for scheme in schemes]
    assert torch.equal(picks[0], picks[1].cpu())


@pytest.mark.parametrize("name", ["artifact", "distance"])
def test_values_are_the_cpus(name: str) -> None:
    spec = ProofSpec(scheme=name, block_hash="block", public_key="key", seq_len=8)
    states = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0))
    on_cpu, on_gpu = (
        load_scheme(spec, hidden_size=1024, n_layers=1, device=device, dtype=torch.bfloat16).finish(
            range(32), states.to(device)
        )
        for device in (CPU, GPU)
    )
    if name == "artifact":
        on_cpu, on_gpu = ([decode_vector(str(value), 12).tolist() for value in values] for values in (on_cpu, on_gpu))
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=0, atol=1e-3)
