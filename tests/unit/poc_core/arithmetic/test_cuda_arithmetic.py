"""A GPU computes the same numbers as a CPU: hashes exactly, floats up to their last bits."""

from typing import Any

import pytest
import torch

from poc_core.arithmetic import fused, reflections, rng
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.base import load_scheme

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
    torch.testing.assert_close(
        rng.normal(SEEDS, n, GPU).cpu(), rng.normal(SEEDS, n, CPU), rtol=0, atol=2e-6
    )


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Within: no fused kernels."""
    monkeypatch.setattr(fused, "is_on", lambda _device: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 100_003, MANY])
def test_fused_normal_is_the_plain_one(n: Any, dtype: Any, request: pytest.FixtureRequest) -> None:
    kernel = rng.normal(SEEDS, n, GPU, dtype)
    request.getfixturevalue("plain")
    assert torch.equal(kernel, rng.normal(SEEDS, n, GPU, dtype))


@pytest.mark.parametrize("stronger", [False, True])
def test_fused_inputs_are_the_plain_ones(stronger: Any, request: pytest.FixtureRequest) -> Any:
    def inputs() -> Any:
        return rng.inputs(
            "block", "key", [0, 5, 2**63 - 1], 33, 1024, GPU, torch.bfloat16, stronger
        )

    kernel = inputs()
    request.getfixturevalue("plain")
    assert torch.equal(kernel, inputs())


@pytest.mark.parametrize("hidden", [128, 256, 1000, 1024, 2048, 4096, 5120, 7168, 8192])
@pytest.mark.parametrize("streams", [[()], [(), ()], [(), (4,)]], ids=str)
def test_fused_reflection_rounds_as_the_plain_one(
    hidden: Any, streams: Any, request: pytest.FixtureRequest
) -> None:
    """The last: hidden states and the residual of hyper-connections."""
    generator = torch.Generator(GPU).manual_seed(hidden)
    terms = [
        torch.randn(4099, *more, hidden, generator=generator, device=GPU).bfloat16()
        for more in streams
    ]
    v = reflections.layer_vectors("block", 1, hidden, GPU, torch.bfloat16)[0]
    kernel = reflections.reflect_terms([x.clone() for x in terms], v)
    request.getfixturevalue("plain")
    assert all(map(torch.equal, kernel, reflections.reflect_terms(terms, v)))


@pytest.mark.parametrize("hidden", [128, 5120])
@pytest.mark.parametrize("k_dim", [1, 12, 128])
def test_picks_are_the_cpus_in_order(hidden: int, k_dim: int) -> None:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=8, options={"k_dim": k_dim})
    schemes: list[Any] = [
        load_scheme(spec, hidden_size=hidden, n_layers=1, device=device, dtype=torch.float32)
        for device in (CPU, GPU)
    ]
    picks = [scheme.pick([0, 7, 2**63 - 1]) for scheme in schemes]
    assert torch.equal(picks[0], picks[1].cpu())


@pytest.mark.parametrize("name", ["artifact", "distance"])
def test_values_are_the_cpus(name: str) -> None:
    spec = ProofSpec(scheme=name, block_hash="block", public_key="key", seq_len=8)
    states = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0))
    schemes: list[Any] = [
        load_scheme(spec, hidden_size=1024, n_layers=1, device=device, dtype=torch.bfloat16)
        for device in (CPU, GPU)
    ]
    on_cpu, on_gpu = (scheme.finish(range(32), states.to(scheme.device)) for scheme in schemes)
    if name == "artifact":
        on_cpu, on_gpu = (
            [decode_vector(str(value), 12).tolist() for value in values]
            for values in (on_cpu, on_gpu)
        )
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=0, atol=1e-3)
