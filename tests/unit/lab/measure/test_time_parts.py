"""What runs under which name belongs to which part of a micro-batch's time."""

import pytest

from lab.measure import time_parts
from lab.measure.time_parts import PARTS, part_of
from workers.engines.base import Kernel, RankProfile


def rank(
    *kernels: Kernel, first_layer: int = 0, seconds: float = 1.0, busy_s: float = 0.75
) -> RankProfile:
    return RankProfile(
        "H200", first_layer, seconds, busy_s, flops=6e12, peak_flops=600e12, kernels=list(kernels)
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products, attention"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
            "matrix products, attention",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
            "matrix products, attention",
        ),
        ("fused_moe_kernel", "matrix products, attention"),
        ("_product_kernel", "matrix products, attention"),
        ("_gates_kernel", "matrix products, attention"),
        ("_last_kernel", "matrix products, attention"),
        ("void vllm::moe::topkGating<8, 128>(...)", "matrix products, attention"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>", "matrix products, attention"),
        ("aten::mm", "matrix products, attention"),
        ("aten::addmm", "matrix products, attention"),
        ("_C::onednn_mm", "matrix products, attention"),
        ("vllm::unified_attention_with_output", "matrix products, attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "matrix products, attention"),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>", "norms"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norms"),
        ("mhc_pre_big_fuse_broadcast_with_norm_tilelang_kernel", "norms"),
        ("_reflect_kernel", "reflections"),
        ("_normal_kernel", "inputs"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_rms_norm", "communication"),
        ("gloo:all_reduce", "communication"),
        ("_C::shm_allreduce", "communication"),
        ("void at::native::radixSortKVInPlace<...>", "tail"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, silu>", "other"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
        ("aten::comm_free_sum", "other"),
    ],
)
def test_a_kernel_belongs_to_the_part_that_its_name_says(name: str, part: str) -> None:
    assert part_of(Kernel("", name, 1.0)) == part


@pytest.mark.parametrize(
    ("step", "part"),
    [
        ("inputs", "inputs"),
        ("reflections", "reflections"),
        ("tail", "tail"),
        ("norms", "norms"),
        ("", "other"),
    ],
)
def test_what_the_engine_marked_as_a_step_belongs_to_it_whatever_its_name(
    step: str, part: str
) -> None:
    assert part_of(Kernel(step, "aten::mul", 1.0)) == part


def test_parts_add_up_to_the_micro_batch_and_gaps_are_what_nothing_filled() -> None:
    found = time_parts.time_parts(
        [rank(Kernel("", "gemm", 0.5), Kernel("inputs", "gemm", 0.25))], n=4
    )
    assert found is not None
    assert found.seconds == dict.fromkeys(PARTS, 0.0) | {
        "matrix products, attention": 0.5,
        "inputs": 0.25,
        "gaps": 0.25,
    }
    assert (found.total_s, found.share("gaps")) == (1.0, 0.25)
    assert found.longest[0] == ("matrix products, attention", "gemm", 0.5)


def test_a_run_that_the_profiler_slowed_has_no_negative_gaps() -> None:
    found = time_parts.time_parts([rank(Kernel("", "gemm", 1.5), seconds=1.0, busy_s=1.5)], n=4)
    assert found is not None
    assert found.seconds["gaps"] == 0


def test_ranks_of_a_stage_are_averaged_and_stages_added() -> None:
    stage = [rank(Kernel("", "gemm", 0.5)), rank(Kernel("", "gemm", 0.7))]
    found = time_parts.time_parts([*stage, rank(Kernel("", "gemm", 0.25), first_layer=18)], n=4)
    assert found is not None
    assert found.seconds["matrix products, attention"] == pytest.approx(0.6 + 0.25)
    assert (found.n_devices, found.n_stages) == (3, 2)


def test_the_share_of_the_peak_is_of_all_devices_together() -> None:
    # 12e12 in all, for 4 nonces.
    ranks = [rank(Kernel("", "gemm", 0.02)), rank(Kernel("", "gemm", 0.02))]
    found = time_parts.time_parts(ranks, n=4)
    assert found is not None
    assert found.share_of_peak(200.0) == pytest.approx(200 * 3e12 / 1200e12)
    assert found.matrices_share_of_peak == pytest.approx(6e12 / 0.02 / 600e12)


def test_an_engine_that_cannot_tell_has_no_parts() -> None:
    assert time_parts.time_parts([], n=4) is None
