"""protocol.md, section 1, against the reference; the fast path against plain formulas."""

import hashlib
import math
from typing import Any

import pytest
import torch

from poc_core.arithmetic import rng
from tests.harness.golden import PRIMITIVES

CPU = torch.device("cpu")


def normal_plain(seed: int, n: int, device: torch.device) -> torch.Tensor:
    """normal(seed, n) as protocol.md writes it: float32 (n,)."""
    m = (n + 1) // 2
    keys = torch.arange(2 * m, dtype=torch.int64, device=device)
    u = rng.murmur3_plain(keys, seed).to(torch.float32) / 2.0**32
    u1, u2 = u[:m].clamp(min=rng._MIN_U1), u[m:]
    radius = torch.sqrt(-2.0 * torch.log(u1))
    angle = 2.0 * math.pi * u2
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:n]


def as_uint32(bits: torch.Tensor) -> torch.Tensor:
    return bits.long() & 0xFFFFFFFF


def largest_difference(computed: torch.Tensor, expected: list) -> float:
    return (computed - torch.tensor(expected)).abs().max().item()


@pytest.mark.parametrize(("text", "seed"), PRIMITIVES["seed_from_string"].items())
def test_seed_is_the_references(text: Any, seed: Any) -> None:
    assert rng.seed_from_string(text) == seed


def test_stronger_seeds_are_the_whole_digest() -> None:
    seeds = rng.stronger_seeds_from_string("abc")
    assert b"".join(seed.to_bytes(4, "big") for seed in seeds) == hashlib.sha256(b"abc").digest()
    assert seeds[0] == rng.seed_from_string("abc")


@pytest.mark.parametrize("case", PRIMITIVES["murmur3"], ids=lambda case: f"seed{case['seed']}")
def test_hashes_are_the_references_exactly(case: Any) -> None:
    first, n = case["first_key"], len(case["hashes"])
    keys = torch.arange(first, first + n)
    assert rng.murmur3_plain(keys, case["seed"]).tolist() == case["hashes"]
    # 16,777,221 keys: also beyond those whose seed-independent part is cached.
    found = rng.hash_bits([case["seed"]], first + n, CPU)[0, first:]
    assert as_uint32(found).tolist() == case["hashes"]


@pytest.mark.parametrize("n", [1, 2, 31, 100_003])
def test_fast_hash_is_the_plain_one(n: int) -> None:
    seeds = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    plain = torch.stack([rng.murmur3_plain(torch.arange(n), seed) for seed in seeds])
    assert torch.equal(as_uint32(rng.hash_bits(seeds, n, CPU)), plain)


@pytest.mark.parametrize("case", PRIMITIVES["uniform"], ids=lambda case: f"seed{case['seed']}")
def test_uniform_is_the_references(case: Any) -> None:
    found = rng.uniform([case["seed"]], case["n"], CPU)[0]
    assert largest_difference(found, case["values"]) <= 1e-6


def test_uniform_rounds_the_hash_to_float32_before_dividing() -> None:
    n = 1 << 16
    plain = rng.murmur3_plain(torch.arange(n), 7).to(torch.float32) / 2.0**32
    assert torch.equal(rng.uniform([7], n, CPU)[0], plain)


def test_a_hash_of_0_gives_the_largest_number_and_no_infinity() -> None:
    # hash(0, seed) is 0 for the one seed that rotl13 and * 5 + 0xE6546B64 turn into 0.
    rotated = -0xE6546B64 * pow(5, -1, 1 << 32) % (1 << 32)
    seed = (rotated >> 13 | rotated << 19) & 0xFFFFFFFF
    u1, u2 = rng.uniform([seed], 2, CPU)[0].tolist()
    assert u1 == 0
    radius, angle = math.sqrt(-2 * math.log(1e-10)), 2 * math.pi * u2
    expected = [radius * math.cos(angle), radius * math.sin(angle)]
    assert rng.normal([seed], 2, CPU)[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert normal_plain(seed, 2, CPU).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "case", [*PRIMITIVES["normal"], *PRIMITIVES["normal_tail"]], ids=lambda case: f"n{case['n']}"
)
def test_normal_is_the_references_also_far_into_the_sequence(case: Any) -> None:
    values = rng.normal([case["seed"]], case["n"], CPU)[0]
    values = values[case["indices"]] if "indices" in case else values
    assert largest_difference(values, case["values"]) <= 1e-6


# Odd and even numbers around a chunk: where columns or rows are cut.
CHUNK = rng._CHUNK_KEYS_CPU


@pytest.mark.parametrize("n", [1, 2, 7, 8192, CHUNK - 1, CHUNK + 2])
def test_fast_normal_is_the_plain_one_bit_for_bit(n: Any) -> None:
    seeds = [3, 0xFFFFFFFF, 12345]
    plain = torch.stack([normal_plain(seed, n, CPU) for seed in seeds])
    assert torch.equal(rng.normal(seeds, n, CPU), plain)


def test_normal_rounds_once_to_the_dtype() -> None:
    exact = rng.normal([5, 6], 1001, CPU)
    assert torch.equal(
        rng.normal([5, 6], 1001, CPU, dtype=torch.bfloat16), exact.to(torch.bfloat16)
    )


def test_normal_of_nothing_is_empty() -> None:
    assert rng.normal([], 5, CPU).shape == (0, 5)
    assert rng.normal([1], 0, CPU).shape == (1, 0)


def test_a_hash_of_zero_gives_a_finite_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(rng, "_mix_", lambda h, scratch: h.zero_())
    z0, _ = rng._box_muller(zeros.clone(), zeros.clone())
    assert torch.isfinite(z0).all()


@pytest.mark.parametrize("name", ["inputs", "inputs_stronger_rng"])
def test_inputs_are_the_references(name: str) -> None:
    case = PRIMITIVES[name]
    x = rng.inputs(
        case["block_hash"],
        case["public_key"],
        case["nonces"],
        case["seq_len"],
        case["dim"],
        CPU,
        torch.float32,
        stronger_rng=name == "inputs_stronger_rng",
    )
    assert largest_difference(x, case["values"]) <= 1e-6


@pytest.mark.parametrize("stronger_rng", [False, True])
def test_inputs_of_a_nonce_do_not_depend_on_its_batch(stronger_rng: bool) -> None:
    def make(nonces: list[int]) -> torch.Tensor:
        return rng.inputs("block", "key", nonces, 5, 13, CPU, torch.float32, stronger_rng)

    batch = make([4, 2**63 - 1, 0])
    found = [torch.equal(batch[i], make([nonce])[0]) for i, nonce in enumerate([4, 2**63 - 1, 0])]
    assert found == [True] * 3


def test_stronger_inputs_smaller_than_eight_segments() -> None:
    inputs = rng.inputs("block", "key", [0], 1, 9, CPU, torch.float32, stronger_rng=True)
    seeds = rng.stronger_seeds_from_string("block_key_nonce0")[:5]
    segments = [rng.normal([seed], n, CPU) for seed, n in zip(seeds, [2, 2, 2, 2, 1], strict=True)]
    assert torch.equal(inputs.view(1, 9), torch.cat(segments, dim=1))


def test_the_key_cache_is_bounded() -> None:
    rng.hash_bits([1], rng._CACHED_KEYS + 1, CPU)
    assert rng._key_cache[CPU].shape[0] <= rng._CACHED_KEYS


# From protocol.md, sections 1 and 2.1, in plain Python, of block 0xabc, public key key.
@pytest.mark.parametrize(
    ("nonce", "ids"),
    [
        (0, [124933, 35038, 24599, 99483, 31266, 21804]),
        (7, [24713, 65658, 26379, 63931, 113905, 4416]),
        (2**63 - 1, [63633, 117272, 122737, 104406, 111063, 4125]),
    ],
)
def test_token_ids_of_deepseek_v4s_vocabulary(nonce: int, ids: list[int]) -> None:
    others = [1, nonce, 2]
    found = rng.token_ids("0xabc", "key", others, len(ids), 129_280, CPU)
    assert found.dtype == torch.int32
    assert found.shape == (3, len(ids))
    assert found[1].tolist() == ids
