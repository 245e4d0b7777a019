"""Kernels on a GPU give the bits of vLLM's operations."""

from typing import Any

import pytest
import torch

from tests.harness.marks import needs_vllm
from tests.harness.samples import known
from tests.planted.operations import CACHE, QUANTISE, SILU, arguments, writing

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

NORM = "_C::rms_norm"
ROWS = [1, 5, 16, 512, 4099]
COLUMNS = [128, 256, 384, 768, 1536, 2048, 3072, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", [SILU, QUANTISE, f"{QUANTISE} by column", f"{QUANTISE} by column, powers"]
)
def test_kernels_give_the_bits_of_vllms_operations(
    kind: str, dtype: torch.dtype, columns: int
) -> None:
    from workers.vllm.kernels.quick_operations import OPERATIONS, all_sizes
    from workers.vllm.release import custom_ops

    name, _, by_column = kind.partition(" ")
    own = custom_ops.operation(name)
    if own is None:
        pytest.skip(f"this release of vLLM has no {name}")
    width = 2 * columns if name == SILU else columns
    generator = torch.Generator("cuda").manual_seed(columns)
    for rows in ROWS:
        like = torch.empty(0, dtype=dtype, device="cuda")
        normal = torch.randn(rows, width, generator=generator, device="cuda")
        outlying = normal * torch.randn(width, generator=generator, device="cuda").mul(3).exp()
        of_all_sizes = all_sizes(max(rows, 2), width, like)
        for x in (normal, outlying, outlying / 300, torch.zeros_like(normal), of_all_sizes):
            x = x.to(dtype).nan_to_num()
            how = bool(by_column), "powers" in by_column
            args, out, scales = arguments(name, x, *how)
            own(*args)
            args, our_out, our_scales = arguments(name, x, *how)
            call = known(OPERATIONS[name].read(*args))
            call.by_kernel()
            assert torch.equal(scales, our_scales)
            assert torch.equal(out.view(torch.uint8), our_out.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 4, 32])
def test_heads_are_normed_with_the_bits_of_vllms_operation(
    heads: int, dtype: torch.dtype, columns: int
) -> None:
    from workers.vllm.kernels.quick_operations import OPERATIONS, all_sizes
    from workers.vllm.release import custom_ops

    own: Any = custom_ops.operation(NORM)
    width = heads * columns
    generator = torch.Generator("cuda").manual_seed(columns)
    weight = torch.randn(columns, generator=generator, device="cuda").to(dtype)
    for rows in (1, 300, 4099):
        like = torch.empty(0, dtype=dtype, device="cuda")
        normal = torch.randn(rows, width + 64, generator=generator, device="cuda").to(dtype)
        for wide in (normal, all_sizes(max(rows, 2), width + 64, like), torch.zeros_like(normal)):
            x = wide[:, :width].view(-1, heads, columns)
            theirs, ours = (
                torch.empty_like(x, memory_format=torch.contiguous_format).fill_(9) for _ in "ab"
            )
            own(theirs, x, weight, 1e-6)
            call = known(OPERATIONS[NORM].read(ours, x, weight, 1e-6))
            call.by_kernel()
            assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("head", "turned"), [(64, 64), (128, 128), (128, 64), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1), (32, 4), (48, 8)])
def test_queries_and_keys_are_turned_with_the_bits_of_vllms_operation(
    heads: tuple[int, int], dtype: torch.dtype, head: int, turned: int
) -> None:
    from workers.vllm.kernels.quick_operations import OPERATIONS, all_sizes
    from workers.vllm.release import custom_ops

    name = "_C::rotary_embedding"
    own: Any = custom_ops.operation(name)
    width, n_query = sum(heads) * head, heads[0] * head
    generator = torch.Generator("cuda").manual_seed(head)
    like = torch.empty(0, dtype=dtype, device="cuda")
    angles = torch.randn(4096, turned, generator=generator, device="cuda").sin().to(dtype)
    for rows in (2, 300, 4099):
        positions = torch.randint(4096, (rows,), generator=generator, device="cuda")
        normal = torch.randn(rows, width + 64, generator=generator, device="cuda").to(dtype)
        for wide in (normal, all_sizes(rows, width + 64, like)):
            theirs, ours = wide.clone(), wide.clone()
            args = [
                (positions, one[:, :n_query], one[:, n_query:width], head, angles, True)
                for one in (theirs, ours)
            ]
            own(*args[0])
            call = known(OPERATIONS[name].read(*args[1]))
            call.by_kernel()
            assert torch.equal(theirs.view(torch.int16), ours.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
def test_caches_are_written_with_the_bits_of_vllms_operation(
    cache: torch.dtype, by_head: bool, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.kernels import quick_operations as quick
    from workers.vllm.release import custom_ops

    monkeypatch.setattr(quick, "LEAST", 0)
    own: Any = custom_ops.operation(CACHE)
    for rows in (1, 300, 4099):
        theirs, ours = (writing(rows, cache, by_head, "cuda", head) for _ in "ab")
        own(*theirs)
        call = known(quick.OPERATIONS[CACHE].read(*ours))
        call.by_kernel()
        for one, other in zip(theirs[2:4], ours[2:4], strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
