"""`doctor --model`: files, room and family, each fault planted and mended."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.models.cache import ModelCache
from cli.examine import model
from cli.examine.model import Model
from poc_core.gpus import Gpu

GB = 10**9
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3 |= {"num_hidden_layers": 4, "dtype": "bfloat16"}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {"num_hidden_layers": 61},
}


def write(folder: Path, config: dict[str, Any] | None = None, weights_gb: float = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 if config is None else config))
    (folder / "tokenizer.json").write_text("{}")
    if weights_gb:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(int(weights_gb * GB))  # of holes only
    return folder


def gpus(*total_gib: int, used_gib: int = 0) -> list[Gpu]:
    return [
        Gpu(index=index, total_memory_mb=gib * 1024, free_memory_mb=(gib - used_gib) * 1024)
        for index, gib in enumerate(total_gib)
    ]


class TestFiles:
    def test_a_folder_without_weights_is_named_and_with_them_it_is_fine(
        self, tmp_path: Path
    ) -> None:
        folder = write(tmp_path / "model")
        _, (found,) = model.find(str(folder))
        assert (found.level, found.says) == ("problem", f"{folder} lacks weights.")
        write(folder, weights_gb=0.001)
        _, (found,) = model.find(str(folder))
        assert found.level == "ok"

    def test_shards_that_the_index_names_and_are_not_there(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model")
        shards = {f"layer{index}": f"model-{index}-of-2.safetensors" for index in (1, 2)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        (folder / "model-1-of-2.safetensors").write_bytes(b"x")
        _, (found,) = model.find(str(folder))
        assert found.says == f"{folder} lacks model-2-of-2.safetensors."
        (folder / "model-2-of-2.safetensors").write_bytes(b"x")
        assert model.find(str(folder))[1][0].level == "ok"

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights_gb=0.001)
        (folder / "tokenizer.json").unlink()
        _, (found,) = model.find(str(folder))
        assert (found.level, found.says) == ("problem", f"{folder} lacks a tokenizer.")

    @pytest.mark.parametrize(
        "name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"]
    )
    def test_a_file_that_is_no_json_is_one_finding(self, tmp_path: Path, name: str) -> None:
        folder = write(tmp_path / "model", weights_gb=0.001)
        (folder / name).write_text('{"weight_map": ')
        there_is, (found,) = model.find(str(folder))
        assert (found.level, found.says) == ("problem", f"{folder / name} is no JSON.")
        assert there_is is not None
        list(model.room(there_is, "auto", [], 1, uses_gpus=False))
        list(model.family(there_is, True, True))

    @pytest.mark.parametrize(
        "config",
        [
            *({"architectures": 5}, {"architectures": [{}]}, {"architectures": "A"}),
            *({"text_config": "x"}, {"text_config": [1]}),
        ],
        ids=str,
    )
    def test_fields_of_another_type_are_as_if_they_lacked(
        self, tmp_path: Path, config: dict[str, Any]
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
        (found,) = model.family(Model("a", tmp_path), True, True)
        assert found.says.startswith("an unnamed architecture: reflected after each of its ?")

    def test_a_name_in_the_index_that_is_no_text_can_be_printed(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", weights_gb=0.001)
        index = '{"weight_map": {"a": "\\ud800"}}'
        (folder / "model.safetensors.index.json").write_text(index)
        _, (found,) = model.find(str(folder))
        assert found.says == f"{folder} lacks \\ud800."

    def test_each_broken_model_of_the_cache_is_a_finding(self, tmp_path: Path) -> None:
        for name, text in (("whole", "{}"), ("broken", "{")):
            folder = write(
                tmp_path / f"models--acme--{name}" / "snapshots" / "abc", weights_gb=0.001
            )
            (folder / "tokenizer_config.json").write_text(text)
        (tmp_path / "models--acme--file").touch()
        (tmp_path / "models--acme--gone").symlink_to(tmp_path / "nowhere")
        write(tmp_path / "models--acme--half" / "snapshots" / "abc")
        found = [(one.level, one.says) for one in model.in_cache(ModelCache(tmp_path))]
        at = tmp_path / "models--acme--"
        assert {level for level, _ in found} == {"warning"}
        assert [says for _, says in found] == [
            f"acme/broken at abc: {at}broken/snapshots/abc/tokenizer_config.json is no JSON.",
            f"acme/file: {at}file/snapshots cannot be read: Not a directory.",
            f"acme/gone: {at}gone is a link to nothing.",
            "acme/half at abc: is here in part.",
        ]

    @pytest.mark.parametrize("name", ["./nowhere", "a/b/c"])
    def test_what_is_no_model_is_one_finding(self, name: str) -> None:
        nothing, (found,) = model.find(name)
        assert (nothing, found.level) == (None, "problem")

    def test_a_shipped_model_is_found_by_its_name(self) -> None:
        found, (finding,) = model.find("tiny-qwen3")
        assert found is not None
        assert found.config["model_type"] == "qwen3"
        assert finding.level == "ok"

    def test_the_hubs_models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        cache = ModelCache(tmp_path)
        _, (absent,) = model.find("owner/name", cache)
        assert (absent.level, "the first start downloads it" in absent.says) == ("warning", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        _, (forbidden,) = model.find("owner/name", cache)
        assert (forbidden.level, "Unset HF_HUB_OFFLINE" in forbidden.remedy) == ("problem", True)

        folder = tmp_path / "models--owner--name"
        snapshot = write(folder / "snapshots" / "abc")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        found, (partial,) = model.find("owner/name", cache)
        assert (partial.level, "in part" in partial.says) == ("problem", True)
        write(snapshot, weights_gb=0.001)
        found, (whole,) = model.find("owner/name", cache)
        assert whole.level == "ok"
        assert found == Model("owner/name", snapshot)


class TestRoom:
    @pytest.mark.parametrize(
        ("there", "size", "level"),
        [
            (gpus(80), 1, "ok"),
            (gpus(20), 1, "problem"),
            (gpus(20, 20), 2, "ok"),
            (gpus(80, used_gib=70), 1, "problem"),
            (gpus(80), 2, "problem"),
        ],
    )
    def test_on_gpus(self, tmp_path: Path, there: list[Gpu], size: int, level: str) -> None:
        there_is = Model("m", write(tmp_path, weights_gb=24))
        (found,) = model.room(there_is, "auto", there, size, uses_gpus=True)
        assert found.level == level

    @pytest.mark.parametrize(("available_gb", "level"), [(64, "ok"), (20, "problem")])
    def test_on_a_machine_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_gb: int, level: str
    ) -> None:
        monkeypatch.setattr(model, "available_bytes", lambda: available_gb * GB)
        there_is = Model("m", write(tmp_path, weights_gb=24))
        (found,) = model.room(there_is, "auto", [], 1, uses_gpus=False)
        assert found.level == level

    def test_of_a_model_that_is_not_here_nothing_can_be_said(self) -> None:
        assert list(model.room(Model("owner/name", None), "auto", [], 1, uses_gpus=False)) == []


class TestFamily:
    def about(
        self, tmp_path: Path, config: dict[str, Any], **changes: Any
    ) -> list[tuple[str, str]]:
        given: dict[str, Any] = {"on_cpu": False, "has_torchvision": True} | changes
        there_is = Model("m", write(tmp_path, config))
        return [(found.level, found.says) for found in model.family(there_is, **given)]

    def test_a_plain_model_is_reflected_after_each_layer(self, tmp_path: Path) -> None:
        assert self.about(tmp_path, QWEN3) == [
            ("ok", "Qwen3ForCausalLM: reflected after each of its 4 layers")
        ]

    def test_a_wrapper_is_not_as_in_the_fleet_and_needs_torchvision(self, tmp_path: Path) -> None:
        ((level, says),) = self.about(tmp_path, KIMI)
        assert level == "ok"
        assert "none of its 61 layers is reflected" in says
        lacking = self.about(tmp_path, KIMI, has_torchvision=False)[-1]
        assert lacking == ("problem", "kimi_k25 needs torchvision.")

    def test_what_cpus_cannot_compute_is_wrong_there_alone(self, tmp_path: Path) -> None:
        sparse = QWEN3 | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
        assert [level for level, _ in self.about(tmp_path, sparse)] == ["ok"]
        on_cpu = self.about(tmp_path, sparse, on_cpu=True)
        assert [level for level, _ in on_cpu] == ["ok", "problem"]

    def test_of_a_model_that_is_not_here_nothing_can_be_said(self) -> None:
        assert list(model.family(Model("owner/name", None), True, True)) == []
