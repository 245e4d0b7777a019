"""Arguments of vLLM whose value is JSON."""

import pytest

from poc_core.errors import ArgumentsError
from poc_core.serving.json_arguments import check_json


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("compilation-config", '{"max_cudagraph_capture_size": 608}'),
        ("compilation-config", '{"mode": 3, "backend": "inductor", "custom_ops": ["+rms_norm"]}'),
        ("compilation-config", '{"cudagraph_mode": "FULL", "pass_config": {"fuse_norm": true}}'),
        ("attention-config", '{"mla_prefill_backend":"TRTLLM_RAGGED"}'),
        ("attention-config", '{"sparse_mla_force_mqa": true}'),
        ("speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
        ("additional-config", '{"kda_prefill_backend": "triton"}'),
        ("hf-overrides", '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'),
        ("limit-mm-per-prompt", '{"image": {"count": 2, "width": 512}}'),
        ("default-chat-template-kwargs", '{"enable_thinking": false}'),
    ],
)
def test_sizes_modes_and_backends_by_name_pass(argument: str, text: str) -> None:
    check_json(argument, text)


@pytest.mark.parametrize(
    ("argument", "text", "key"),
    [
        ("compilation-config", '{"cache_dir": "/tmp"}', "cache_dir"),
        ("compilation-config", '{"debug_dump_path": "x"}', "debug_dump_path"),
        ("compilation-config", '{"inductor_passes": {"a": "os.system"}}', "inductor_passes"),
        ("compilation-config", '{"pass_config": {"path": 1}}', "path"),
        ("speculative-config", '{"model": "evil/model"}', "model"),
        ("speculative-config", '{"draft_load_config": {}}', "draft_load_config"),
        ("additional-config", '{"anything": 1}', "anything"),
        ("attention-config", '{"hisparse_config": {}}', "hisparse_config"),
        ("hf-overrides", '{"auto_map": {"AutoConfig": "x"}}', "auto_map"),
        ("hf-overrides", '{"text_config": {"auto_map": 1}}', "auto_map"),
        ("mm-processor-kwargs", '{"trust_remote_code": true}', "trust_remote_code"),
        ("mm-processor-kwargs", '{"code_revision": "x"}', "code_revision"),
        ("default-chat-template-kwargs", '{"chat_template": "x"}', "chat_template"),
    ],
)
def test_a_key_that_names_code_or_a_place_is_refused_by_name(
    argument: str, text: str, key: str
) -> None:
    with pytest.raises(ArgumentsError) as error:
        check_json(argument, text)
    assert f"--{argument} has the key '{key}'" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "text", "said"),
    [
        ("compilation-config", '{"backend": "evil_module"}', "backend may be eager, inductor here"),
        ("speculative-config", '{"method": "custom_class"}', "method may be deepseek_mtp, mtp"),
        ("speculative-config", '{"method": ["mtp"]}', "method may be deepseek_mtp, mtp"),
        ("attention-config", '{"backend": "my.Backend"}', "cannot have 'my.Backend' in it"),
        ("compilation-config", '{"custom_ops": ["/etc/passwd"]}', "cannot have '/etc/passwd'"),
        ("hf-overrides", '{"x": [[[[[1]]]]]}', "--hf-overrides is nested too deep"),
        ("compilation-config", '{"mode": 0, "mode": 3}', "without repeated keys"),
        ("compilation-config", '{"mode": NaN}', "takes a JSON object"),
        ("compilation-config", "[" * 4000, "takes a JSON object"),
        ("compilation-config", "3", "takes a JSON object"),
        ("compilation-config", "/etc/passwd", "takes a JSON object"),
    ],
)
def test_other_values_are_refused(argument: str, text: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as error:
        check_json(argument, text)
    assert said in str(error.value)
