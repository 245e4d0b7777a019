"""The known faults of vLLM's releases, as far as they show without an engine."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.families.make import FOLDER
from tests.harness.marks import needs_vllm
from workers.vllm.start.log_patterns import NO_OTHER_START, why_hopeless

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

SPARSE = {"index_topk": 2048, "kv_lora_rank": 512}
REFUSED = (
    "vLLM 0.25.1 cannot keep sparse attention's cache in 8 bits (its issue 48378); use"
    " --kv-cache-dtype auto, or a later vLLM"
)


@pytest.mark.parametrize("asked", [[], ["all"], ["none"], ["all", "+rotary_embedding"]])
@pytest.mark.parametrize("latent", [True, False])
def test_mla_on_cpus_leaves_rotary_embedding_to_torch(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], latent: bool
) -> None:
    from vllm.platforms import current_platform
    from vllm.transformers_utils import config as vllms

    from workers.vllm.release import faults

    text = SimpleNamespace(kv_lora_rank=512) if latent else SimpleNamespace()
    monkeypatch.setattr(
        vllms, "get_config", lambda *_: SimpleNamespace(get_text_config=lambda: text)
    )
    operations = [*asked]
    faults.avoid(
        SimpleNamespace(
            model="m",
            trust_remote_code=False,
            revision=None,
            compilation_config=SimpleNamespace(custom_ops=operations),
        )
    )
    avoided = ["-rotary_embedding"] if asked else ["all", "-rotary_embedding"]
    chosen = "+rotary_embedding" in asked or not latent or not current_platform.is_cpu()
    assert operations == asked + ([] if chosen else avoided)


@pytest.mark.parametrize(
    ("dtype", "kept", "given", "backend"),
    [
        ("float32", "bfloat16", None, "CPU_MLA"),
        ("float32", "float32", "AMX_MLA", "AMX_MLA"),
        ("half", "bfloat16", None, "CPU_MLA"),
        ("auto", "float16", None, "CPU_MLA"),
        ("auto", "float32", None, None),
        ("auto", "bfloat16", None, None),
        ("bfloat16", "float32", None, None),
    ],
)
@pytest.mark.parametrize("has_amx", [True, False])
def test_mla_on_cpus_is_computed_in_the_type_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    kept: str,
    given: str | None,
    backend: str | None,
    has_amx: bool,
) -> None:
    """By vLLM's own choice, with AMX and without, whatever this machine has."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from workers.vllm.release import faults

    if not current_platform.is_cpu():
        pytest.skip("a choice for CPUs")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    config = json.loads((FOLDER / "deepseek-v3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": kept}))
    arguments = AsyncEngineArgs(
        model=str(tmp_path), dtype=dtype, attention_backend=given, max_model_len=64
    )
    faults.avoid(arguments)
    found = arguments.attention_backend
    assert getattr(found, "name", found) == backend
    made = arguments.create_engine_config()
    chosen = current_platform.get_attn_backend_cls(
        made.attention_config.backend, SimpleNamespace(use_sparse=False, use_mla=True)
    )
    takes = getattr(importlib.import_module(chosen.rpartition(".")[0]), chosen.rpartition(".")[2])
    assert given or made.model_config.dtype in takes.supported_dtypes


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next", "kimi_linear"])
@pytest.mark.parametrize(
    ("is_cpu", "release"), [(True, "0.32.0"), (True, "0.99.0"), (False, "0.32.0")]
)
def test_families_that_no_cpu_computes_are_refused_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, family: str, is_cpu: bool, release: str
) -> None:
    from vllm import platforms, version
    from vllm.transformers_utils import config as vllms

    from workers.vllm.release import faults

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setattr(version, "__version__", release)
    monkeypatch.setattr(vllms, "get_config", lambda *_: SimpleNamespace(model_type=family))
    arguments = SimpleNamespace(model="m", trust_remote_code=False, revision=None)
    why_not = faults.why_not_on_cpus(arguments)
    if (is_cpu, release) == (True, "0.32.0"):
        assert why_not is not None
        assert why_not.startswith(f"vLLM 0.32.0 cannot compute {family} on CPUs, as ")
        assert why_not.endswith("deploy it on a host with GPUs")
        assert why_hopeless([f"error: vLLM cannot start: {why_not}"]) == NO_OTHER_START
    else:
        assert why_not is None


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another platform than this one: its compute capability, and vLLM's release there."""
    from vllm import platforms, version

    def change(major: int, release: str = "0.25.1") -> None:
        capability = SimpleNamespace(major=major, minor=0)
        cuda = SimpleNamespace(
            is_cpu=lambda: False, is_cuda=lambda: True, get_device_capability=lambda: capability
        )
        monkeypatch.setattr(platforms, "current_platform", cuda)
        monkeypatch.setattr(version, "__version__", release)

    return change


@pytest.mark.parametrize(
    ("installed", "asked", "chosen"),
    [
        (False, None, "triton"),
        (False, "cutedsl", "cutedsl"),
        (True, None, None),
    ],
)
def test_gated_delta_nets_do_without_flashinfer(
    monkeypatch: pytest.MonkeyPatch, on: Any, installed: bool, asked: str | None, chosen: str | None
) -> None:
    from workers.vllm.release import faults

    on(9)
    monkeypatch.setattr(faults, "find_spec", lambda name: object() if installed else None)
    arguments = SimpleNamespace(gdn_prefill_backend=asked)
    faults.avoid(arguments)
    assert arguments.gdn_prefill_backend == chosen
    faults.avoid(SimpleNamespace())  # a release without it


@pytest.mark.parametrize(
    ("release", "flashinfer", "planned"),
    [
        ("0.30.0", True, "torch.float8_e4m3fn"),
        ("0.30.0", False, "torch.uint8"),
        ("0.32.0", True, "torch.uint8"),  # which does it where it makes the plan
    ],
)
def test_sparse_attention_on_hopper_plans_for_caches_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, on: Any, release: str, flashinfer: bool, planned: str
) -> None:
    import torch

    from workers.vllm.release import faults

    backend = SimpleNamespace(_SM90State=lambda *args, **more: (args, more))
    name = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
    monkeypatch.setitem(sys.modules, name, backend)
    monkeypatch.setattr(faults, "find_spec", lambda _: object() if flashinfer else None)
    on(9, release)
    faults.plan_for_caches_of_8_bits()
    state = vars(backend)["_SM90State"]
    args, more = state("cuda", 64, torch.uint8, 8192, 2048, sm_scale=0.1)
    assert (str(args[2]), args[:2], args[3:]) == (planned, ("cuda", 64), (8192, 2048))
    assert more == {"sm_scale": 0.1}
    assert state("cuda", 64, torch.bfloat16)[0] == ("cuda", 64, torch.bfloat16)


def test_vllm_0_30_still_has_what_is_mended_there() -> None:
    """The builder's own arguments, in the release that wants them changed."""
    import inspect

    from vllm.version import __version__

    if not __version__.startswith("0.30."):
        pytest.skip(f"vLLM {__version__} is not 0.30")
    name = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
    state = vars(importlib.import_module(name))["_SM90State"]
    assert [*inspect.signature(state).parameters][:3] == ["device", "num_heads", "kv_dtype"]


def test_vllms_argument_for_them_is_still_called_so() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs.gdn_prefill_backend is None


NO_ROTARY = SPARSE | {"qk_rope_head_dim": 0}  # GLM-5.3-Flash
ROTARY = SPARSE | {"qk_rope_head_dim": 64}  # DeepSeek-V3.2
PLANNED = "FLASHINFER_MLA_SPARSE_SM90"


@pytest.mark.parametrize(
    ("major", "text", "backend", "asked", "left"),
    [
        (9, NO_ROTARY, None, 32_768, 16_384),
        (9, NO_ROTARY, PLANNED, 65_536, 16_384),
        (9, ROTARY, SimpleNamespace(name=PLANNED), 65_536, 16_384),
        (9, NO_ROTARY, None, 8_192, 8_192),
        (9, NO_ROTARY, "FLASH_ATTN_MLA_SPARSE", 32_768, 32_768),
        (9, ROTARY, None, 32_768, 32_768),
        (9, NO_ROTARY | {"index_topk": None}, None, 32_768, 32_768),
        (9, {}, None, 32_768, 32_768),
        (9, None, None, 32_768, 32_768),  # vLLM itself reports that it cannot read this model
        (10, NO_ROTARY, None, 32_768, 32_768),
    ],
)
def test_flashinfer_gets_no_more_tokens_than_it_can_plan(
    monkeypatch: pytest.MonkeyPatch,
    on: Any,
    caplog: pytest.LogCaptureFixture,
    major: int,
    text: dict[str, Any] | None,
    backend: Any,
    asked: int,
    left: int,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.transformers_utils import config as vllms

    from workers.vllm.release import faults

    def get_config(*_: Any) -> Any:
        if text is None:
            raise OSError("no config.json")
        return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))

    arguments = AsyncEngineArgs(attention_backend=backend, max_num_batched_tokens=asked)
    on(major, "0.30.0")
    monkeypatch.setattr(vllms, "get_config", get_config)
    faults.avoid(arguments)
    assert arguments.max_num_batched_tokens == left
    assert (f"most {left} tokens at a time, not {asked}" in caplog.text) == (left < asked)


def config(cache_dtype: str, **text: int) -> SimpleNamespace:
    return SimpleNamespace(
        lora_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text)),
    )


@pytest.mark.parametrize(
    ("major", "cache_dtype"), [(9, "fp8"), (9, "fp8_e4m3"), (9, "fp8_ds_mla"), (10, "fp8_ds_mla")]
)
def test_sparse_attentions_cache_in_8_bits_is_refused_where_vllm_cannot_lay_it_out(
    on: Any, major: int, cache_dtype: str
) -> None:
    from workers.vllm.release import faults

    on(major)
    assert faults.why_not_startable(config(cache_dtype, **SPARSE)) == REFUSED


@pytest.mark.parametrize(
    ("major", "release", "cache_dtype", "text"),
    [
        (9, "0.25.1", "auto", SPARSE),
        (9, "0.26.0", "fp8", SPARSE),
        (10, "0.25.1", "fp8", SPARSE),
        (9, "0.25.1", "fp8", {"kv_lora_rank": 512}),
        (9, "0.25.1", "fp8", {"index_topk": 512}),
    ],
    ids=[
        "16 bits",
        "a later release",
        "a newer GPU",
        "latent attention that is not sparse",
        "DeepSeek-V4",
    ],
)
def test_nothing_else_is(
    on: Any, major: int, release: str, cache_dtype: str, text: dict[str, int]
) -> None:
    from workers.vllm.release import faults

    on(major, release)
    assert faults.why_not_startable(config(cache_dtype, **text)) is None


@pytest.mark.parametrize(
    ("cache_dtype", "text", "refused"),
    [
        ("fp8", {"kv_lora_rank": 512}, True),
        ("fp8_e4m3", SPARSE, True),
        ("auto", {"kv_lora_rank": 512}, False),
        ("fp8", {}, False),
    ],
)
def test_latent_attentions_cache_in_8_bits_is_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str, text: dict[str, int], refused: bool
) -> None:
    from vllm import platforms

    from workers.vllm.release import faults

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    why_not = faults.why_not_startable(config(cache_dtype, **text))
    assert ("cannot answer chat on CPUs" in why_not if why_not else False) is refused


def test_adapters_are_refused_before_the_model_is_loaded() -> None:
    from vllm.config import LoRAConfig

    from workers.vllm.release import faults

    asked = config("auto")
    asked.lora_config = LoRAConfig()
    assert "leave --enable-lora out" in str(faults.why_not_startable(asked))


def test_on_cpus_a_generator_of_a_request_is_not_drawn_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from workers.vllm.release import faults

    def update(scheduled: Any) -> str:
        for new in scheduled.scheduled_new_reqs:
            generator = torch.Generator().manual_seed(new.sampling_params.seed)
            with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
                generator.set_offset(0)
            runner.requests[new.req_id] = SimpleNamespace(generator=generator)
            runner.input_batch.generators[0] = generator
        return "answer"

    batch = SimpleNamespace(generators={}, req_id_to_index={"a": 0})
    runner = SimpleNamespace(
        device=torch.device("cpu"), _update_states=update, requests={}, input_batch=batch
    )
    faults.keep_generators(runner)
    new = SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(seed=5))
    assert runner._update_states(SimpleNamespace(scheduled_new_reqs=[new])) == "answer"
    kept = batch.generators[0]
    assert runner.requests["a"].generator is kept
    kept.set_offset(kept.get_offset() - 4)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(3, generator=kept), expected)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, Model architectures"
            " ['Glm5NextForConditionalGeneration'] are not supported for now. Supported"
            " architectures: dict_keys(['AfmoeForCausalLM', 'ApertusForCausalLM'])",
            "vLLM 0.25.1 does not know models of the kind Glm5NextForConditionalGeneration; take"
            " vLLM 0.30 or later (",
        ),
        (
            "The checkpoint you are trying to load has model type `glm5_next` but Transformers"
            " does not recognize this architecture.",
            "vLLM 0.25.1 does not know models of the kind glm5_next; take vLLM 0.30 or later (",
        ),
        (
            "The checkpoint you are trying to load has model type `acme` but Transformers does"
            " not recognize this architecture.",
            "vLLM 0.25.1 does not know models of the kind acme; take a release of vLLM that does (",
        ),
        ("CUDA out of memory", None),
    ],
)
def test_a_model_that_vllm_has_no_class_of(
    monkeypatch: pytest.MonkeyPatch, said: str, why: str | None
) -> None:
    from vllm import version

    from workers.vllm.release import faults

    monkeypatch.setattr(version, "__version__", "0.25.1")
    found = faults.why_unknown(said)
    assert (found is None) == (why is None)
    assert found is None or found.startswith(str(why))
    assert found is None or why_hopeless([f"error: {found}"]) == NO_OTHER_START
