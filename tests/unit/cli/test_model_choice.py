"""What --model may be, and the name under which clients find it."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from cli.model_choice import check_can_be_found, check_is_there, choose_model, need_no_hub
from cli.shipped import ModelChoiceError, shipped_models
from poc_core.errors import ProoflineError
from tests.peers.hub import COMMIT, FILES, REPO, Hub
from workers.engines.options import EngineOptions


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_shipped_model_by_its_name() -> None:
    assert choose_model("tiny-qwen3", None) == (str(shipped_models()["tiny-qwen3"]), "tiny-qwen3")


def test_a_directory_is_served_under_its_last_part(model_dir: Path) -> None:
    assert choose_model(str(model_dir), None) == (str(model_dir), "my-model")
    assert choose_model(f"{model_dir}/", None) == (str(model_dir), "my-model")


def test_a_relative_directory_becomes_absolute(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir)
    assert choose_model(".", None) == (str(model_dir), "my-model")


def test_a_directory_of_a_shipped_models_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-qwen3").mkdir()
    (tmp_path / "tiny-qwen3" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert choose_model("tiny-qwen3", None)[0] == str(tmp_path / "tiny-qwen3")


def test_a_name_on_the_hub_is_passed_on() -> None:
    assert choose_model("Qwen/Qwen3-0.6B", None) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")


def test_the_name_for_clients_can_be_chosen(model_dir: Path) -> None:
    assert choose_model(str(model_dir), "other")[1] == "other"
    assert choose_model("tiny-qwen3", "other")[1] == "other"
    assert choose_model("Qwen/Qwen3-0.6B", "other")[1] == "other"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (".", r"has no config\.json"),
        *(
            (model, r"There is no directory .*tiny-qwen3")
            for model in (
                *("./none", "/no/such/model", "models/none/at-all", "~/none", "", "~nobody/x"),
                *("~\0", "./" + "x" * 5000),
            )
        ),
        ("tiny-qwen", "did you mean tiny-qwen3"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelChoiceError, match=why):
        choose_model(model, None)


def vllm(model: str, *arguments: str) -> EngineOptions:
    return EngineOptions(model=model, engine="vllm", vllm_args=arguments)


def test_a_name_that_the_hub_knows_is_asked_for_once(hub: Hub) -> None:
    check_is_there(vllm(REPO))
    assert hub.asked == [f"/api/models/{REPO}"]


def test_a_name_that_the_hub_does_not_know_is_refused(hub: Hub) -> None:
    with pytest.raises(ModelChoiceError, match="no model 'acme/smal': the Hugging Face hub has"):
        check_is_there(vllm("acme/smal"))


def test_a_hub_out_of_reach_is_asked_once_and_told_of(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = huggingface_hub.HfApi  # made before the hub is closed
    hub.__exit__()
    monkeypatch.setattr(huggingface_hub, "HfApi", nowhere)
    with pytest.raises(ProoflineError, match=r"cannot be reached \(.*\): give a model's directory"):
        check_is_there(vllm(REPO))


def test_nobody_is_asked_where_the_hub_is_forbidden(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ProoflineError, match="HF_HUB_OFFLINE forbids to ask"):
        check_is_there(vllm(REPO))
    assert hub.asked == []


def test_a_new_process_looks_for_a_model(tmp_path: Path) -> None:
    """huggingface_hub loads its parts when they are first named; here nothing else names them."""
    script = (
        "from cli.model_choice import check_can_be_found\n"
        "from poc_core.errors import ProoflineError\n"
        "try: check_can_be_found('acme/smal', [])\n"
        "except ProoflineError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", script]
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert "HF_HUB_OFFLINE forbids to ask" in said


@pytest.mark.parametrize(
    "model", [REPO, "tiny-qwen3", "/data/of-a-host", "./none", "s3://bucket/m", "~/m"]
)
def test_what_the_hosts_may_find_is_not_refused_for_them(hub: Hub, model: str) -> None:
    check_can_be_found(model, [])
    assert hub.asked == ([f"/api/models/{REPO}"] if model == REPO else [])


def test_what_the_hub_does_not_know_the_hosts_will_not_find(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelChoiceError, match="no model 'acme/smal'"):
        check_can_be_found("acme/smal", ["--max-model-len", "512"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ProoflineError, match="HF_HUB_OFFLINE forbids to ask"):
        check_can_be_found("acme/smal", [])


@pytest.mark.parametrize("words", [("--revision", "b" * 40), (f"--revision={'b' * 40}",)])
@pytest.mark.parametrize("is_forbidden", [True, False])
def test_another_revision_than_is_here_is_said_at_once(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    is_forbidden: bool,
) -> None:
    nowhere = huggingface_hub.HfApi  # made before the hub is closed
    hub.__exit__()
    monkeypatch.setattr(huggingface_hub, "HfApi", nowhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_forbidden)
    repo = tmp_path / "models--acme--small"
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "config.json").touch()
    here = f"{tmp_path} has its revisions {COMMIT}"
    with pytest.raises(ProoflineError, match=f"at the revision 'bbb.*{here}"):
        check_is_there(vllm(REPO, *words))
    check_is_there(vllm(REPO, "--revision", "other", "--revision", COMMIT))
    if is_forbidden:  # vLLM would take `main`, which is not said to be here
        with pytest.raises(ProoflineError, match=here):
            check_is_there(vllm(REPO))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
    check_is_there(vllm(REPO))
    assert hub.asked == []


def test_nobody_is_asked_for_what_is_here_or_sought_elsewhere(
    hub: Hub, tmp_path: Path, model_dir: Path
) -> None:
    snapshot = tmp_path / "models--other--cached" / "snapshots" / "0123" / "config.json"
    snapshot.parent.mkdir(parents=True)
    snapshot.touch()
    check_is_there(vllm("other/cached"))
    check_is_there(vllm(str(model_dir)))
    check_is_there(vllm("other/none", "--download-dir=/models"))
    check_is_there(EngineOptions(model="other/none", engine="synthetic"))
    assert hub.asked == []


@pytest.mark.parametrize(
    ("is_whole", "answers", "model", "is_offline"),
    [
        (True, True, REPO, False),
        (True, False, REPO, True),
        (True, False, f"{REPO} --revision {COMMIT}", True),
        (True, False, f"{REPO} --revision {'b' * 40}", False),
        (True, True, f"{REPO} --revision {COMMIT}", False),
        (False, False, REPO, False),
    ],
)
def test_a_model_that_is_complete_here_needs_no_hub(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_whole: bool,
    answers: bool,
    model: str,
    is_offline: bool,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    repo = tmp_path / "models--acme--small"
    for name, data in FILES.items():
        path = repo / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_whole or not name.endswith(".safetensors"):
            path.write_bytes(data)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    if not answers:
        nowhere = huggingface_hub.HfApi  # made before the hub is closed
        hub.__exit__()
        monkeypatch.setattr(huggingface_hub, "HfApi", nowhere)
    name, *words = model.split()
    need_no_hub(vllm(name, *words))
    assert huggingface_hub.constants.HF_HUB_OFFLINE is is_offline
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if is_offline else "")


def test_a_model_that_the_hub_refuses_is_loaded_from_disk(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    folder = tmp_path / "models--acme--gone" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    need_no_hub(vllm("acme/gone", "--revision", COMMIT))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "does not confirm acme/gone" in caplog.text
